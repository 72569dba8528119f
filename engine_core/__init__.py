"""The engine process: decides which requests, tokens, blocks and slots go into each step.

It handles token ids only, never text. It imports `protocol`, msgspec, pyzmq and llguidance, but
neither torch nor an HTTP library. No other package imports it: other processes send it messages.
`Engine` (engine.py) is a pure object that makes every decision. `EngineLoop` (loop.py) owns the
sockets and decides nothing.

engine       the decisions: add, abort, plan, commit
loop         the event loop around it
policy       whether a request is admitted, in which order requests wait, each account's share
schedule     one step: its rows, its plan for the worker, the commit of its result
blocks       the blocks of the KV cache, and the prefix cache
encode       requests that encode: embeddings, rankings, scores
speculation  drafts
grammar      grammars and the masks that they give
kv           K/V that other engines or tiers have
adapters     LoRA adapters
connections  the clients
workers      the worker, or the workers of a group
history      the last steps and requests, for reports
journal      a record of all input, and its replay
"""
