"""Memory required by a model and memory available on the machine."""
