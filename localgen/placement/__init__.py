"""Where a model runs and the memory that it takes: backend, layers on GPUs, footprint."""
