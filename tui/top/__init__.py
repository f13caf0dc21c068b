"""`localgen top`."""
