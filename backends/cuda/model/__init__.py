"""The decoder: forward pass, linear layers and weight loading."""
