"""Converts text to token ids and back, without sockets, HTTP or threads of its own."""
