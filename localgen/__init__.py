"""Run language models on your own machine, from the terminal."""

__version__ = "0.1.0"
# what client and server speak to each other; a server that speaks another is restarted or refused
PROTOCOL = 1
