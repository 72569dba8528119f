"""Routes that speak of tokens rather than answers."""
