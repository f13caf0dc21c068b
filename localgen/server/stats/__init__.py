"""Statistics: request log, /metrics, /v1/stats."""
