"""This machine: CPU, memory bandwidth, GPUs, the llama.cpp build, and Python subprocesses."""
