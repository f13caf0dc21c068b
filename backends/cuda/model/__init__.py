"""The decoder and its weights: where they are read from, how layers compute with them."""
