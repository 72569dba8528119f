"""The subcommands of `tidegate`, one module each."""
