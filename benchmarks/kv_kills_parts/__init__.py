"""Parts of benchmarks.kv_kills."""
