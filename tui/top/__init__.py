"""The `localgen top` app."""
