"""Guesses the formats that a model writes from its chat template and its vocabulary.

A template that renders calls or reasoning contains the markers of the model's own format. Markers
that few models share give the surest guess, so the rules are listed from the most to the least
distinctive. The first rule that matches decides. The list is searched up to three times, each time
for weaker evidence:

1. The chat template contains all signs of the rule.
2. Each sign is in the template or is a token of the vocabulary. This search skips rules whose signs
   are tokens of other models, too.
3. The vocabulary has the tokens of a family of models.

Each result has an explanation. It also reports if the vocabulary suggests another format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from gateway.formats.lexicon import marker_suffix, suffixed_markers

BAR = "\uff5c"
ANY = ":*"
"""Placeholder in a sign for the suffix of this checkpoint's markers.

If the checkpoint has no such suffix, the sign does not match.
"""


class DetectionRule(msgspec.Struct, frozen=True):
    """A rule that chooses the format `name` if all signs are present.

    texts   the signs, which are searched for in the template
    alone   whether a token of the vocabulary counts as a sign, because no other model has that
            token
    family  tokens that suggest the format even if the template has no sign of it
    """

    name: str
    texts: tuple[str, ...]
    alone: bool = False
    family: tuple[str, ...] = ()


class Detected(msgspec.Struct, frozen=True):
    """Names for `registry.format_of`, and the reason for the choice in one sentence.

    written  whether the chat template writes tool calls in the chosen format
    """

    tools: str | None
    reasoning: str | None
    why: str
    written: bool = False


LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

TOOL_RULES = (
    DetectionRule("openai", ("<|channel|>", "commentary"), True),
    DetectionRule("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>"), True),
    DetectionRule("kimi_k2", ("<|tool_calls_section_begin|>",), True),
    DetectionRule("deepseek_v41", (f"{BAR}DSML{BAR} calls",)),
    DetectionRule("deepseek_v4", (f"{BAR}DSML{BAR}", "tool_calls>")),
    DetectionRule("deepseek_v32", (f"{BAR}DSML{BAR}",)),
    DetectionRule("step3", (f"<{BAR}tool_calls_begin{BAR}>",), True),
    DetectionRule("deepseek_v3", (f"<{BAR}tool▁sep{BAR}>", "```json")),
    DetectionRule("deepseek_v31", (f"<{BAR}tool▁sep{BAR}>",)),
    DetectionRule("minimax_m3", ("]<]minimax[>[",)),
    DetectionRule("minimax_m2", ("<minimax:tool_call>",), True),
    DetectionRule("seed_oss", ("<seed:tool_call>",), True),
    DetectionRule("muse_glimmer", ("<atem:function_calls>",)),
    DetectionRule("dots", ("<dots_function_call>",)),
    DetectionRule("longcat", ("<longcat_tool_call>",), True),
    DetectionRule("k2_horizon", ("<ifm|tool_call>",), True),
    DetectionRule("hy_v3", (f"<tool_calls{ANY}>", f"<tool_sep{ANY}>"), True),
    DetectionRule("hy_v4", (f"<tool_calls{ANY}>",), True),
    DetectionRule("hy_v3", ("<tool_sep>",)),
    DetectionRule("poolside_v1", ("<arg_key>", "<assistant>")),
    DetectionRule("glm47", ("<arg_key>",), True),
    DetectionRule("gemma4", ("<|tool_call>",), True),
    DetectionRule("functiongemma", ("<start_function_call>",), True),
    DetectionRule("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    DetectionRule("internlm", ("<|action_start|>", "<|plugin|>"), True),
    DetectionRule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>"), True),
    DetectionRule("cohere_command3", ("<|START_ACTION|>",), True),
    DetectionRule("apertus", ("<|tools_prefix|>",), True),
    DetectionRule("inkling", ("<|content_invoke_tool_json|>",), True),
    DetectionRule("gigachat3", ("<|function_call|>",), True),
    DetectionRule("gigachat3", ("function call<|role_sep|>",)),
    DetectionRule("minicpm3", ("<|tool_call_start|>", "```python")),
    DetectionRule("lfm2", ("<|tool_call_start|>",), True),
    DetectionRule("mistral", ("[TOOL_CALLS]",), True),
    DetectionRule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    DetectionRule("minicpm5", ("<function name=", "<param name=")),
    DetectionRule("olmo3", ("<function_calls>",)),
    DetectionRule("granite", ("<|tool_call|>",), True),
    DetectionRule("granite-20b-fc", ("<function_call>",)),
    DetectionRule("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    DetectionRule("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    DetectionRule("jamba", ("<tool_calls>",)),
    DetectionRule("ernie45", ("<tool_call>", "<response>")),
    DetectionRule("hermes", ("<tool_call>",), True),
    DetectionRule("phi4_mini_json", ("functools[",)),
    DetectionRule("phi4_mini_json", ("<|tool|>", "<|/tool|>"), True),
    DetectionRule("nemotron_json", ("<TOOLCALL>",)),
    DetectionRule("solar_open", ("<|tool_call:begin|>",), True),
    DetectionRule("functionary_v22", ("<|recipient|>", "<|from|>"), True),
    DetectionRule("functionary_v31", ("<function=", "<function=example_function_name>")),
    DetectionRule("functionary_v32", (">>>", ">>>${recipient}")),
    DetectionRule("hammer", ("[BEGIN OF AVAILABLE_TOOLS]",)),
    DetectionRule("llama4_pythonic", ("<|python_start|>",), True),
    DetectionRule("pythonic", ("[func_name1(",)),
    DetectionRule("llama3_json", ("<|python_tag|>",), True),
    DetectionRule("llama3_json", ('{"name": function name, "parameters":',), family=LLAMA_3),
)

REASONING_RULES = (
    DetectionRule("openai_gptoss", ("<|channel|>", "analysis")),
    DetectionRule("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>"), True),
    DetectionRule("muse_glimmer", ("to=self",)),
    DetectionRule("inkling", ("<|content_thinking|>",), True),
    DetectionRule("gemma4", ("<|channel>",), True),
    DetectionRule("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>"), True),
    DetectionRule("cohere_command3", ("<|START_THINKING|>",), True),
    DetectionRule("minimax_m3", ("<mm:think>",), True),
    DetectionRule("seed_oss", ("<seed:think>",), True),
    DetectionRule("k2_horizon", ("<ifm|think>",), True),
    DetectionRule("plamo3", ("<|plamo:begin_think:plamo|>",)),
    DetectionRule("apertus", ("<|inner_prefix|>",), True),
    DetectionRule("hy_v3", (f"<think{ANY}>", f"<tool_sep{ANY}>"), True),
    DetectionRule("hy_v4", (f"<think{ANY}>",), True),
    DetectionRule("mistral", ("[THINK]",), True),
    DetectionRule("granite", ("Here is my thought process:",)),
    DetectionRule("apriel", ("[BEGIN FINAL RESPONSE]",)),
    DetectionRule("minicpm3", ("<|thought_start|>",), True),
    DetectionRule("solar_open", ("<|think|>", "<|tool_call:begin|>"), True),
    DetectionRule("hunyuan_a13b", ("</think>", "<answer>")),
    DetectionRule("ernie45", ("</think>", "<response>")),
    DetectionRule("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    DetectionRule("deepseek_v41", ("</think>", f"{BAR}DSML{BAR} calls")),
    DetectionRule("deepseek_v4", ("</think>", f"{BAR}DSML{BAR}")),
    DetectionRule("step3", ("</think>", f"<{BAR}tool_calls_begin{BAR}>")),
    DetectionRule("deepseek_v3", ("</think>", f"<{BAR}tool▁sep{BAR}>", "thinking")),
    DetectionRule("deepseek_r1", ("</think>", f"<{BAR}Assistant{BAR}>")),
    DetectionRule("minimax_m2", ("</think>", "<minimax:tool_call>")),
    DetectionRule("glm45", ("</think>", "<arg_key>")),
    DetectionRule("qwen3", ("</think>", "enable_thinking")),
    DetectionRule("olmo3", ("<think>", "<function_calls>")),
    DetectionRule("qwen3", ("<think>",), True),
)


TokenId = Callable[[str], int | None]


def detect(template: str | None, token_id: TokenId, added_tokens: Collection[str] = ()) -> Detected:
    """Return the formats of a model with this chat template and this vocabulary.

    token_id      returns the id of the token with a given text, or None
    added_tokens  the added tokens of the vocabulary. They show whether markers have a suffix
    """
    suffix = marker_suffix(added_tokens) or marker_suffix(suffixed_markers(template or ""))
    tools = _choose(TOOL_RULES, _Evidence(template, token_id, suffix))
    reasoning = _choose(REASONING_RULES, _Evidence(template, token_id, suffix))
    why = f"tool calls: {tools.name or 'none'}, {tools.why}; "
    why += f"reasoning: {reasoning.name or 'none'}, {reasoning.why}"
    return Detected(tools.name, reasoning.name, why, tools.written)


class _Evidence(msgspec.Struct, frozen=True):
    template: str | None
    token_id: TokenId
    suffix: str

    def written(self, sign: str) -> str | None:
        """Return the sign as the template spells it, or None if the template lacks it."""
        return next((t for t in self._spellings(sign) if t in (self.template or "")), None)

    def token(self, sign: str) -> str | None:
        """Return the sign as the vocabulary spells it, or None if it is not a token."""
        return next((t for t in self._spellings(sign) if self.token_id(t) is not None), None)

    def _spellings(self, sign: str) -> Iterator[str]:
        if ANY not in sign:
            yield sign
        elif self.suffix:
            yield sign.replace(ANY, self.suffix)
            yield sign.replace(ANY, "")


class _Choice(msgspec.Struct, frozen=True):
    name: str | None
    why: str
    written: bool = False


def _choose(rules: Sequence[DetectionRule], seen: _Evidence) -> _Choice:
    for rule in rules:
        written = [seen.written(text) for text in rule.texts]
        if all(written):
            why = f"as the chat template writes {_listed(written)}"
            return _Choice(rule.name, why + _in_vocabulary(rule, rules, seen), written=True)
    for rule in rules:
        if rule.alone and all(seen.token(text) or seen.written(text) for text in rule.texts):
            return _Choice(rule.name, _mixed(rule, seen))
    for rule in rules:
        if rule.family and all(map(seen.token, rule.family)):
            return _Choice(rule.name, f"as the vocabulary has {_listed(rule.family)}")
    if seen.template is None:
        return _Choice(None, "as there is no chat template and no marker in the vocabulary")
    return _Choice(None, "as neither the chat template nor the vocabulary has markers for them")


def _in_vocabulary(rule: DetectionRule, rules: Sequence[DetectionRule], seen: _Evidence) -> str:
    """Return what to add to the explanation: whether the vocabulary supports the choice or suggests
    another format. Return "" if it does neither."""
    if tokens := [token for text in rule.texts if (token := seen.token(text))]:
        return f" ({_listed(tokens)} in the vocabulary, too)"
    for other in rules:
        if other.alone and other.name != rule.name and all(map(seen.token, other.texts)):
            tokens = [seen.token(text) or "" for text in other.texts]
            return f" (though the vocabulary has {_listed(tokens)}, as {other.name} would)"
    return ""


def _mixed(rule: DetectionRule, seen: _Evidence) -> str:
    written = [text for text in map(seen.written, rule.texts) if text]
    tokens = [seen.token(text) for text in rule.texts if not seen.written(text)]
    writes = f"the chat template writes {_listed(written)} and " if written else ""
    return f"as {writes}the vocabulary has {_listed(tokens)}"


def _listed(texts: Sequence[str | None]) -> str:
    return " and ".join(map(str, texts))
