"""Ollama's protocol: what its own clients need to find their way when their host is set to us."""
