"""K/V that changes hands (protocol/kv.py draws the conversation): the engine's decisions.

handle    the sealed envelope that stands for a prompt's K/V
leases    blocks that are kept for others, and until when
fetches   blocks that are being filled from elsewhere, and what became of it
peers     what engines of one cluster may ask of each other
tiers     blocks that the worker keeps beyond its cache, as far as it has told
exchange  all of it, as the engine and its scheduler see it
"""
