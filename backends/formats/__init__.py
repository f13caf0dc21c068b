"""What a model is on disk: its files, its shape, its weights' sizes, whatever the format."""
