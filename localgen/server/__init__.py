"""HTTP in front of engine processes: one server for a user, one process for a model."""
