"""Anthropic's Messages API. A request is translated into a chat request."""
