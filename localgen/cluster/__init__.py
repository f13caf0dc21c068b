"""Many engines behind one address, on Ray Serve: `localgen cluster`."""
