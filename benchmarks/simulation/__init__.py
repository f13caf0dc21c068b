"""A discrete-event simulation of a cluster: `python -m benchmarks.simulation`."""
