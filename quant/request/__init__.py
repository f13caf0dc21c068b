"""Values that cross the process boundary: the request, its recipe and form, and the events."""
