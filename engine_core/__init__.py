"""Decisions: which requests, tokens, blocks and slots go into each step. No torch, no HTTP, no
text.

Imports protocol, msgspec, pyzmq and llguidance only. Nothing imports this package: other processes
send it messages. `Engine` (engine.py) is a pure object; `loop.py` owns the sockets and decides
nothing.
"""
