"""Rendering requests into tokens, and answers out of tokens, for those who generate elsewhere."""
