"""Floors 0 and 1: the engine that every model runs in, and the runners under it."""
