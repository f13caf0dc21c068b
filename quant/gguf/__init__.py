"""GGUF output: converted by localgen, requantized by llama.cpp."""
