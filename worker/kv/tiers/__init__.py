"""Computed blocks that outlive their place in the KV cache: in host memory, and on disk."""
