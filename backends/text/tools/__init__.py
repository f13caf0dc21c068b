"""Calls of functions: how model families write them, read back and held to their schemas."""
