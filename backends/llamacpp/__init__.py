"""GGUF models through llama.cpp on CPU, Metal, CUDA or Vulkan."""
