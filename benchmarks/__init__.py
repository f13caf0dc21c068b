"""Benchmarks of localgen next to other engines and libraries. Not part of the package."""
