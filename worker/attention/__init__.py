"""Attention over the paged KV cache: an interface, a reference, and fast implementations."""
