"""Draft tokens: how many to verify, where they come from, and what they cost."""
