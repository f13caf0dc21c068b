"""Measurements of localgen beside llama.cpp's own tools. Not part of the package."""
