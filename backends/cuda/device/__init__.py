"""Device-specific load options, and the sizes of context and KV cache."""
