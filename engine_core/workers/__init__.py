"""The workers: starting and feeding them, and noticing that one is late, stopped or lost."""
