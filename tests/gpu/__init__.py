"""Tests of the CUDA backend on a GPU."""
