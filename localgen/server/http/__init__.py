"""The HTTP layer: who may connect, how much they may send, errors in each protocol's shape."""
