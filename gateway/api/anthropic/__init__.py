"""Anthropic's Messages API: a request is a chat, its answer a list of blocks."""
