"""`from protocol.async_client import AsyncClient`: the public name of sdk/async_client.py."""

from protocol.sdk.async_client import AsyncClient, AsyncEngine, AsyncGeneration

__all__ = ["AsyncClient", "AsyncEngine", "AsyncGeneration"]
