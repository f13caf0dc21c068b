"""Tensor parallelism: rank 0, its worker processes, and the part of a model on each rank."""
