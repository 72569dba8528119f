"""Speculative decoding: drafts and how many of them pay off."""
