"""Hands and eyes: what people type, and what starts and watches the other processes.

May import: protocol, msgspec, tqdm and the standard library. May be imported by: nobody; the tests
use `tools.models.fetch` and `tools.commands.models` to find the default model. Other rooms are
started, never imported.
"""
