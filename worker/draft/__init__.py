"""The draft model of speculative decoding."""
