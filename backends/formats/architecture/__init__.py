"""Model descriptions independent of the file format: spec, shape, RoPE, shards."""
