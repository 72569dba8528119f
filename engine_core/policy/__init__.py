"""Who is admitted, in which order, and how much of the engine each account gets."""
