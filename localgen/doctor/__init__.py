"""Check this machine and its installation, and suggest improvements."""
