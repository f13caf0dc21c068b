"""Step execution on the device: CUDA graphs, run-ahead, sampling, logprobs."""
