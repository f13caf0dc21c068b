"""What this machine has, what localgen makes of it, and what would help."""
