"""K/V transfer: the engine's decisions (protocol/worker/kv.py describes the messages).

- handle: the sealed text that names a prompt's K/V
- leases: blocks that are kept for other engines
- fetches: blocks that the worker is filling from another engine or a tier
- peers: the other engines of the cluster as suppliers and readers of K/V
- tiers: index of the blocks that the worker keeps in host memory and on disk
- transfers: the interface of this package for the engine and its scheduler
"""
