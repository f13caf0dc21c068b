"""Model descriptions that do not depend on the file format: shape, rotary positions, shards."""
