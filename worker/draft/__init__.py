"""The draft model."""
