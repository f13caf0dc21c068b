"""What to quantize and how: the request, its recipe, the form of the screen."""
