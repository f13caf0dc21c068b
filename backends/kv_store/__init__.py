"""Computed prefixes outside of the KV cache: in RAM, then on disk, in blocks of tokens."""
