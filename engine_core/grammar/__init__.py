"""Grammars: what an answer must look like, from the client's words to the mask of each step.

`book.py` is pure and part of the engine: which grammars are compiled, and who waits for one.
`source.py` writes a grammar in llguidance's language, `compiler.py` compiles it, `service.py` does
that in threads beside the loop. `matcher.py` and `masks.py` follow each request's answer.

llguidance is imported by the service's thread alone, so that no start waits for it.
"""
