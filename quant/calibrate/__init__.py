"""What calibration measures: inputs of each linear over windows of text."""
