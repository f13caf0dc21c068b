"""This machine: CPU, memory and its bandwidth, GPUs, the build of llama.cpp, Python processes."""
