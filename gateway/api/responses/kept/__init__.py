"""Responses that were kept: read, listed, streamed again, cancelled and deleted."""
