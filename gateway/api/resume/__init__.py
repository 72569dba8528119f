"""Streams that a client can resume after its connection broke, on request."""
