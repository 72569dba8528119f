"""K/V transfer: the engine's decisions (protocol/kv.py describes the messages).

- handle: the sealed text that names a prompt's K/V
- leases: blocks kept for other engines, and until when
- fetches: blocks being filled from another engine or a tier
- peers: what engines of one cluster may ask of each other
- tiers: blocks that the worker keeps outside its cache
- transfers: all of this, as the engine and its scheduler use it
"""
