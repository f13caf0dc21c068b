"""A step on the device: CUDA graphs, run-ahead, sampling, log probabilities."""
