"""Tiers: host memory and disk. Each block, and each checkpoint of a recurrent state, is copied to
them once it is published, and the copy remains after the KV cache has dropped it."""
