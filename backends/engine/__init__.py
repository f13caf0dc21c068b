"""Floor 0: scheduling, batching and the loop, the same for every runner."""
