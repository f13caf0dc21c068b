"""Floor 0: text to tokens and back, the same for every runner."""
