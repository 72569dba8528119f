"""Tiers: host memory and disk. Each block is copied to them once it is published, and the copy
remains after the KV cache has dropped the block."""
