"""Floor 1: Hugging Face models on NVIDIA GPUs, through paged attention and Triton kernels."""
