"""Policy: admission, waiting order, and each account's share of the engine."""
