"""Estimate a model's memory and speed on this machine before it is loaded."""
