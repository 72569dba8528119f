"""A request, and the small records that it holds. Everything else in the engine works on these."""
