"""Which formats a model writes, guessed from its chat template and its vocabulary.

A template that can render calls or reasoning spells the markers of the model's own format; the more
peculiar they are, the surer the guess. Rules are tried in order, the peculiar ones first, and the
first that fits decides. A vocabulary alone decides only where the template says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

BAR = "\uff5c"


class Rule(msgspec.Struct, frozen=True):
    """The format `name`, if the template has all of `texts`; or, where `alone`, if the vocabulary
    has them all as tokens."""

    name: str
    texts: tuple[str, ...]
    alone: bool = False


class Detected(msgspec.Struct, frozen=True):
    """Names for `formats.format_of`, and the reason in one sentence."""

    tools: str | None
    reasoning: str | None
    why: str


TOOL_RULES = (
    Rule("openai", ("<|channel|>", "commentary"), True),
    Rule("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>"), True),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>",), True),
    Rule("deepseek_v41", (f"{BAR}DSML{BAR} calls",)),
    Rule("deepseek_v4", (f"{BAR}DSML{BAR}", "tool_calls>")),
    Rule("deepseek_v32", (f"{BAR}DSML{BAR}",)),
    Rule("step3", (f"<{BAR}tool_calls_begin{BAR}>",), True),
    Rule("deepseek_v3", (f"<{BAR}tool▁sep{BAR}>", "```json")),
    Rule("deepseek_v31", (f"<{BAR}tool▁sep{BAR}>",)),
    Rule("minimax_m3", ("]<]minimax[>[",)),
    Rule("minimax_m2", ("<minimax:tool_call>",), True),
    Rule("seed_oss", ("<seed:tool_call>",), True),
    Rule("muse_glimmer", ("<atem:function_calls>",)),
    Rule("dots", ("<dots_function_call>",)),
    Rule("longcat", ("<longcat_tool_call>",), True),
    Rule("k2_horizon", ("<ifm|tool_call>",), True),
    Rule("hy_v4", ("<tool_calls:opensource>",), True),
    Rule("hy_v3", ("<tool_sep>",)),
    Rule("poolside_v1", ("<arg_key>", "<assistant>")),
    Rule("glm47", ("<arg_key>",), True),
    Rule("gemma4", ("<|tool_call>",), True),
    Rule("functiongemma", ("<start_function_call>",), True),
    Rule("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    Rule("internlm", ("<|action_start|>", "<|plugin|>"), True),
    Rule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>"), True),
    Rule("cohere_command3", ("<|START_ACTION|>",), True),
    Rule("apertus", ("<|tools_prefix|>",), True),
    Rule("inkling", ("<|content_invoke_tool_json|>",), True),
    Rule("gigachat3", ("<|function_call|>",), True),
    Rule("gigachat3", ("function call<|role_sep|>",)),
    Rule("lfm2", ("<|tool_call_start|>",), True),
    Rule("mistral", ("[TOOL_CALLS]",), True),
    Rule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    Rule("minicpm5", ("<function name=", "<param name=")),
    Rule("olmo3", ("<function_calls>",)),
    Rule("granite", ("<|tool_call|>",), True),
    Rule("granite-20b-fc", ("<function_call>",)),
    Rule("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    Rule("jamba", ("<tool_calls>",)),
    Rule("ernie45", ("<tool_call>", "<response>")),
    Rule("hermes", ("<tool_call>",), True),
    Rule("phi4_mini_json", ("functools[",)),
    Rule("phi4_mini_json", ("<|tool|>", "<|/tool|>"), True),
    Rule("llama4_pythonic", ("<|python_start|>",), True),
    Rule("pythonic", ("[func_name1(",)),
    Rule("llama3_json", ("<|python_tag|>",), True),
    Rule("llama3_json", ('{"name": function name, "parameters":',)),
)

REASONING_RULES = (
    Rule("openai_gptoss", ("<|channel|>", "analysis")),
    Rule("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>"), True),
    Rule("muse_glimmer", ("to=self",)),
    Rule("inkling", ("<|content_thinking|>",), True),
    Rule("gemma4", ("<|channel>",), True),
    Rule("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>"), True),
    Rule("cohere_command3", ("<|START_THINKING|>",), True),
    Rule("minimax_m3", ("<mm:think>",), True),
    Rule("seed_oss", ("<seed:think>",), True),
    Rule("k2_horizon", ("<ifm|think>",), True),
    Rule("plamo3", ("<|plamo:begin_think:plamo|>",)),
    Rule("apertus", ("<|inner_prefix|>",), True),
    Rule("hy_v4", ("<think:opensource>",), True),
    Rule("mistral", ("[THINK]",), True),
    Rule("granite", ("Here is my thought process:",)),
    Rule("hunyuan_a13b", ("</think>", "<answer>")),
    Rule("ernie45", ("</think>", "<response>")),
    Rule("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    Rule("deepseek_v41", ("</think>", f"{BAR}DSML{BAR} calls")),
    Rule("deepseek_v4", ("</think>", f"{BAR}DSML{BAR}")),
    Rule("step3", ("</think>", f"<{BAR}tool_calls_begin{BAR}>")),
    Rule("deepseek_v3", ("</think>", f"<{BAR}tool▁sep{BAR}>", "thinking")),
    Rule("deepseek_r1", ("</think>", f"<{BAR}Assistant{BAR}>")),
    Rule("minimax_m2", ("</think>", "<minimax:tool_call>")),
    Rule("glm45", ("</think>", "<arg_key>")),
    Rule("qwen3", ("</think>", "enable_thinking")),
    Rule("olmo3", ("<think>", "<function_calls>")),
    Rule("qwen3", ("<think>",), True),
)


def detect(template: str | None, token_id: Callable[[str], int | None]) -> Detected:
    """What to call the formats of a model with this chat template and this vocabulary."""
    tools, tools_why = _choose(TOOL_RULES, template, token_id)
    reasoning, reasoning_why = _choose(REASONING_RULES, template, token_id)
    why = f"tool calls: {tools or 'none'}, {tools_why}; reasoning: {reasoning or 'none'}, "
    return Detected(tools, reasoning, why + reasoning_why)


def _choose(
    rules: Sequence[Rule], template: str | None, token_id: Callable[[str], int | None]
) -> tuple[str | None, str]:
    if template is not None:
        for rule in rules:
            if all(text in template for text in rule.texts):
                return rule.name, f"as the chat template writes {_listed(rule.texts)}"
    for rule in rules:
        if rule.alone and all(token_id(text) is not None for text in rule.texts):
            return rule.name, f"as the vocabulary has {_listed(rule.texts)}"
    if template is None:
        return None, "as there is no chat template and no marker in the vocabulary"
    return None, "as neither the chat template nor the vocabulary has markers for them"


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(texts)
