"""Converts messages, given as decoded JSON, to a prompt as text or token ids."""
