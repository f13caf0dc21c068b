"""Tensor parallelism: rank 0, its worker processes, and the model shard of each rank."""
