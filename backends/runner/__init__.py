"""The border between the engine and a model: ModelRunner, and the Sequence that both speak of."""
