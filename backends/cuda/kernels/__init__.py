"""GPU kernels of the model layers, each with a PyTorch reference implementation."""
