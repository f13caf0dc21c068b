"""Models on disk: files, configurations, shapes and tensors, in GGUF and Hugging Face's format."""
