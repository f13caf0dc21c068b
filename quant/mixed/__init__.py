"""GGUF files whose tensors have the types that cost the model least at a given size."""
