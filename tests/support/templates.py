"""Short chat templates with the thinking options of real ones, and a loader without limits."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.prompt.template import ChatTemplate, ParsedTemplate

_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

SWITCH = _TURNS + (
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Thinks unless turned off, which adds an empty thinking block to the prompt (Qwen3)."""

OPENING_SWITCH = _TURNS + (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% else %}</think>{% endif %}"
    "{% endif %}"
)
"""Thinks only if turned on, which opens the thinking block in the prompt (DeepSeek V3.1)."""

MODE = _TURNS + (
    "{% set mode = thinking_mode | default('adaptive') %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if mode == 'enabled' %}<think>{% elif mode == 'disabled' %}</think>{% endif %}{% endif %}"
)
"""Has three thinking modes (MiniMax M3)."""

EFFORT = _TURNS + (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if reasoning_effort in ['high', 'low'] %}<think>"
    "{% elif reasoning_effort == 'no_think' %}<think></think>"
    "{% else %}{{ raise_exception('unknown effort') }}{% endif %}{% endif %}"
)
"""Turns thinking on and off by the effort, with its own names (Hunyuan)."""

FREE_EFFORT = "Reasoning: {{ reasoning_effort | default('medium') }}\n" + _TURNS + "<assistant>"
"""Writes any effort into the prompt (gpt-oss)."""

SWITCH_AND_EFFORT = _TURNS + (
    "{% if add_generation_prompt %}<assistant>{% if not thinking %}</think>"
    "{% elif reasoning_effort == 'max' %}Think hard.<think>{% else %}<think>{% endif %}{% endif %}"
)
"""Has a switch and an effort (DeepSeek V4)."""

THINKING_TEMPLATES = {
    "switch": SWITCH,
    "opening switch": OPENING_SWITCH,
    "mode": MODE,
    "effort": EFFORT,
    "free effort": FREE_EFFORT,
    "switch and effort": SWITCH_AND_EFFORT,
}


class UnlimitedTemplates:
    """Loads templates into this process, without limits."""

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        return ChatTemplate(source, special_tokens)

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        return ChatTemplate(source, special_tokens)
