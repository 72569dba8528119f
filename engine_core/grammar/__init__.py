"""Grammars: from the client's constraint to the token mask of each step.

- cache: compiled grammars, and the requests that wait for one; part of the pure engine
- source, lark, markers: write a grammar in llguidance's language
- shortest: refuses a grammar that demands a huge text
- compiler, probe: compile a grammar, and check that it can be enforced
- service, compile_queue: run the compiler in threads beside the loop, in turns between accounts
- meter, heap: measure what a compiled grammar keeps, and return freed memory to the system
- matcher, thinking_budget, masks: the state of each answer, and the masks that follow from it

llguidance is imported only in the service's threads, so it does not delay the start of the engine.
"""
