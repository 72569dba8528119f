"""What the engine and its workers say to each other: steps, K/V transfers, and ranks."""
