"""Scripts of `benchmarks.foreign_loaders` that run in environments without localgen."""
