"""Text side of a model, which its gateway needs: tokenizer, templates, defaults. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.model_card import SamplingDefaults

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of a model's chat templates; the second is for conversations with tools. A request cannot
select any other template."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Tokenizer, templates and defaults; the fields mean the same as in ModelCard."""

    tokenizer: bytes
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    tool_use_template: str | None = None
    response_template: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    license: str | None = None
