"""Chat templates with the idioms of thinking in use, in a few lines each; and a loader of any."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.prompt.template import ChatTemplate, ParsedTemplate

_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

SWITCH = _TURNS + (
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Thinks unless told not to; an empty block says not to (Qwen3)."""

OPENING_SWITCH = _TURNS + (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% else %}</think>{% endif %}"
    "{% endif %}"
)
"""Does not think unless told to; the prompt opens the block (DeepSeek V3.1)."""

MODE = _TURNS + (
    "{% set mode = thinking_mode | default('adaptive') %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if mode == 'enabled' %}<think>{% elif mode == 'disabled' %}</think>{% endif %}{% endif %}"
)
"""A mode in three words (MiniMax M3)."""

EFFORT = _TURNS + (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if reasoning_effort in ['high', 'low'] %}<think>"
    "{% elif reasoning_effort == 'no_think' %}<think></think>"
    "{% else %}{{ raise_exception('unknown effort') }}{% endif %}{% endif %}"
)
"""The effort is the switch, in words of its own (Hunyuan)."""

FREE_EFFORT = "Reasoning: {{ reasoning_effort | default('medium') }}\n" + _TURNS + "<assistant>"
"""Any word is written into the prompt (gpt-oss)."""

SWITCH_AND_EFFORT = _TURNS + (
    "{% if add_generation_prompt %}<assistant>{% if not thinking %}</think>"
    "{% elif reasoning_effort == 'max' %}Think hard.<think>{% else %}<think>{% endif %}{% endif %}"
)
"""Both (DeepSeek V4)."""

THINKING_TEMPLATES = {
    "switch": SWITCH,
    "opening switch": OPENING_SWITCH,
    "mode": MODE,
    "effort": EFFORT,
    "free effort": FREE_EFFORT,
    "switch and effort": SWITCH_AND_EFFORT,
}


class UnlimitedTemplates:
    """Loads templates into this process: for tests that need no limits, and no process."""

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        return ChatTemplate(source, special_tokens)

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        return ChatTemplate(source, special_tokens)
