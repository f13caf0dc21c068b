"""Parts of benchmarks.soak."""
