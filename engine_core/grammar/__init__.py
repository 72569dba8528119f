"""Grammars: from the client's constraint to the token mask of each step.

`cache.py` is pure and part of the engine: compiled grammars, and the requests that wait for one.
`source.py` writes a grammar in llguidance's language, `compiler.py` compiles it, and `service.py`
runs the compiler in threads beside the loop. `matcher.py` and `masks.py` follow each answer.

Only the service's threads import llguidance, so it does not delay the start.
"""
