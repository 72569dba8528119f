"""K/V blocks sent to and fetched from other workers."""
