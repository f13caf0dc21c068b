"""From the name of a model to the files it lies in."""
