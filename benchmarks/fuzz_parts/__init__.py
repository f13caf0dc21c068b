"""Parts of benchmarks.fuzz."""
