"""Generation and embedding requests, independent of the API protocol."""
