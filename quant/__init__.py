"""Quantization: a request becomes a job, which reports progress and ends in a measured result."""
