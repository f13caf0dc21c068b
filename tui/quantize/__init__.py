"""The quantize screen of `localgen tui`, and the run that goes on behind it."""
