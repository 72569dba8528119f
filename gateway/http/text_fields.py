"""Types of the text fields of request bodies. Each has a largest length, or counts as a prompt.

A text without a bound would be kept for as long as its request runs, and some are stored and sent
back with each event. A test checks that every text field of every API has one of these types or a
bound of its own.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

COUNTS_AS_PROMPT = "counts_as_prompt"
"""Member of a field's `Meta.extra`: the model reads the text, so its context bounds the length.
Until then `gateway/http/body.py` does."""

PromptText = Annotated[str, Meta(extra={COUNTS_AS_PROMPT: True})]
Name = Annotated[str, Meta(max_length=1024)]
"""The name of a model or of one of its parts, which may be a path."""
Label = Annotated[str, Meta(max_length=512)]
"""A word with a meaning to the client or to the API. OpenAI allows 64 characters for identifiers of
end users, but proxies put Claude Code's into such a field, which have 150."""
TemplateText = Annotated[str, Meta(max_length=1 << 20)]
"""A chat template. Published ones have up to 20,000 characters."""
