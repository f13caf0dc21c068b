"""What a model would take here and how fast it could be, before it is loaded."""
