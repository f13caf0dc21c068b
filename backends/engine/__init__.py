"""Scheduling, batching and the engine loop, shared by all model runners."""
