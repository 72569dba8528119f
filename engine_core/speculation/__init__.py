"""Speculative decoding: the drafters, and the policy that decides how many drafts to verify."""
