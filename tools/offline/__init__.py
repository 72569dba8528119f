"""Starts the processes of `protocol.sdk.offline.LLM`."""
