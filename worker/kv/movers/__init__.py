"""Movers: ways to copy bytes from one worker's cache into another's."""
