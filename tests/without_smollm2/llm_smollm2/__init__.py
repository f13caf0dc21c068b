"""An empty package instead of the real one, so that tests find the same models everywhere."""
