"""The way into the server that every command takes."""

from localgen.client.answers import Answer, Embeddings, Health, ModelCard, RunningModel, Text
from localgen.client.client import Client

__all__ = ["Answer", "Client", "Embeddings", "Health", "ModelCard", "RunningModel", "Text"]
