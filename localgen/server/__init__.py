"""HTTP server in front of engine processes: one server per user, one engine process per model."""
