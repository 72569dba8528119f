"""Tiers: host memory and disk, which keep computed blocks that the KV cache has dropped."""
