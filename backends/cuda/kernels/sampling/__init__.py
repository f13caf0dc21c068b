"""Sampling and rejection sampling on the device."""
