"""The CUDA backend: Hugging Face models on NVIDIA GPUs, with paged attention and Triton kernels."""
