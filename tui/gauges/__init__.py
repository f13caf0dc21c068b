"""Gauges of a server: each draws one part of a ServerSample."""
