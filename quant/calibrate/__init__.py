"""Calibration: statistics of the inputs of linears over windows of text."""
