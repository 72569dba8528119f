"""Turns logits into sampled tokens and their logprobs."""
