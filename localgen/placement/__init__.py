"""Placement of a model: backend, GPU layers, and memory footprint."""
