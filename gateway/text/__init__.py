"""Converts text to token ids and back. Pure: no sockets, no HTTP, no threads of its own."""
