"""The way into the server that every command takes, and into other servers."""

from localgen.client.answers import Answer, Embeddings, Health, ModelCard, RunningModel, Text
from localgen.client.client import Client
from localgen.client.model_client import ModelClient
from localgen.client.remote.client import RemoteClient

__all__ = [
    "Answer",
    "Client",
    "Embeddings",
    "Health",
    "ModelCard",
    "ModelClient",
    "RemoteClient",
    "RunningModel",
    "Text",
]
