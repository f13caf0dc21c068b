"""What a model takes of memory, and what there is: one source for each number."""
