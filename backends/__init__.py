"""The inference engine, the model runners under it, and the file formats they load."""
