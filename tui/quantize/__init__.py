"""The quantize screen of `localgen tui`, and the background run that it shows."""
