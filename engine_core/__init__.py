"""The engine process: decides which requests, tokens, blocks and slots go into each step.

It handles token ids only, never text. It imports `protocol`, msgspec, pyzmq and llguidance, but
neither torch nor an HTTP library. No other package imports it: other processes send it messages.
`Engine` (engine.py) is a pure object that makes every decision. `EngineLoop` (loop.py) owns the
sockets and decides nothing.
"""
