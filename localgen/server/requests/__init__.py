"""One request for text or vectors, whatever protocol it came by."""
