"""`from protocol.client import Client`: the public name of sdk/client.py."""

from protocol.sdk.client import Client, Engine, Generation

__all__ = ["Client", "Engine", "Generation"]
