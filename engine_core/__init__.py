"""Decisions: which request, token, block, slot, and when. No torch, no HTTP, no text.

May import: protocol, msgspec, pyzmq. May be imported by: nobody; other processes talk to it.
The engine is a pure object (`engine.py`); `loop.py` owns the sockets and contains no decision.
"""
