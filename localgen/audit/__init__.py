"""How often a quantized model, or a quantized KV cache, would have chosen another token."""
