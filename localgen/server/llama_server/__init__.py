"""Routes of llama-server and vLLM for the tokens of a prompt."""
