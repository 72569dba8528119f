"""Starts the processes of `protocol.offline.LLM`."""
