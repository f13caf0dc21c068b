"""The parts of benchmarks.agreement."""
