"""Gauges of a server: each draws a part of a ServerSample."""
