"""Resident models: engine processes, loading, eviction, draft models."""
