"""Streams that a client can pick up again after it lost the connection, where it asked for that."""
