"""Sampling: turns logits into sampled tokens and their logprobs."""
