"""Coding agents, run end to end (make test-agents)."""
