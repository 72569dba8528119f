"""Logits to sampled tokens and their log-probabilities."""
