"""The interface between the engine and a model: ModelRunner and Sequence."""
