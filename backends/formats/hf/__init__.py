"""Hugging Face folders: config.json, tokenizer.json, safetensors."""
