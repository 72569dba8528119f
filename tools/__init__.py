"""The `tidegate` command, and the supervisor that starts and watches the other processes.

May import protocol, msgspec, tqdm and the standard library. No other room imports it; the tests use
`tools.models.fetch` and `tools.commands.models` to find the default model. Tools start the other
rooms as processes and never import them.
"""
