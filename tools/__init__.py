"""The `tidegate` command, and the supervisor that starts and watches the other processes.

This package imports protocol, msgspec, tqdm and the standard library, huggingface_hub and httpx2
only for a download, and argcomplete only for completion. It starts programs of the other packages
as processes and never imports them. No other package imports tools; only the tests use
`tools.models.fetch` and `tools.commands.models`, to find the default model.
"""
