"""Messages between the engine and its workers: steps, K/V transfers, and ranks."""
