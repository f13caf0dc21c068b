"""Run language models on your own machine, from the terminal."""

__version__ = "0.1.0"
