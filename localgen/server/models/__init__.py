"""Models in memory: engine processes, loading and eviction, draft models."""
