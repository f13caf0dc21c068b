"""The Ollama API, for clients whose OLLAMA_HOST points to this server."""
