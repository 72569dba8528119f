"""Finds the formats that a model writes from its chat template and its vocabulary.

The surest evidence is what the template itself writes: tiny conversations are rendered when it is
loaded, and the format that parses the rendered call, or the rendered reasoning, is the model's
format. The rules list the signs of each format, because several formats may parse the same answer.
The list is searched up to five times, each time for weaker evidence:

1. The template renders a call or reasoning with the signs of the rule, and the format parses it. If
   several rules match, the one with the most rendered markers decides.
2. The same, but the format parses only the first of two calls.
3. The source of the template contains all signs of the rule. Here and below the rules are in order
   from the most to the least distinctive, and the first one that matches decides.
4. The template renders a call that has the shape of the rule, and the format parses it.
5. Each sign is in the source or is a token of the vocabulary. This search skips rules whose signs
   are tokens of other models, too. Last, the vocabulary may have the tokens of a family of models.

If the template renders calls that no format parses, searches 3 and 5 are skipped: the template then
only mentions the signs. Each result has an explanation. It also reports if the vocabulary suggests
another format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from gateway.formats.lexicon import marker_suffix, suffixed_markers
from gateway.formats.round_trip import RenderedAnswers, RoundTrip
from gateway.prompt.written import CALLS, WrittenTurn

BAR = "\uff5c"
ANY = ":*"
"""Placeholder in a sign for the suffix of this checkpoint's markers.

If the checkpoint has no such suffix, the sign does not match.
"""


class DetectionRule(msgspec.Struct, frozen=True):
    """A rule that chooses the format `name` if all signs are present.

    texts   the signs. The first one is part of each call, or of the reasoning, that is rendered.
            The others may be anywhere in the template
    alone   whether a token of the vocabulary counts as a sign, because no other model has that
            token
    family  tokens that suggest the format even if the template has no sign of it
    shape   for calls without a marker: pattern of a rendered answer, in which NAME stands for the
            name of the tool. It replaces the first sign in rendered answers
    """

    name: str
    texts: tuple[str, ...]
    alone: bool = False
    family: tuple[str, ...] = ()
    shape: str = ""


class Detected(msgspec.Struct, frozen=True):
    """Names for `registry.format_of`, and the reason for the choice in one sentence.

    written  whether the chat template writes tool calls in the chosen format
    """

    tools: str | None
    reasoning: str | None
    why: str
    written: bool = False


_START = r"(?:^|>)\s*"
"""Pattern of the start of an answer; markers that are not part of the call may precede it."""
JSON_OBJECT = _START + r'\{"name": "NAME", "parameters": '
JSON_ARRAY = _START + r'\[\s*\{"name": "NAME", "arguments": '
PYTHON_CALL = _START + r"\[NAME\("

LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

_ASKS_FOR_JSON = '{"name": function name, "parameters":'

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
    DetectionRule("hy_v3", ("<tool_sep>", "<arg_key>")),
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
    DetectionRule("lfm2", ("<|tool_list_start|>",)),
    DetectionRule("mistral", ("[TOOL_CALLS]",), True),
    DetectionRule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    DetectionRule("minicpm5", ("<function name=", "<param name=")),
    DetectionRule("olmo3", ("<function_calls>",)),
    DetectionRule("granite", ("<|tool_call|>",), True),
    DetectionRule("granite-20b-fc", ("<function_call>",)),
    DetectionRule("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    DetectionRule("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    DetectionRule("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    DetectionRule("jamba", ("<tool_calls>[",)),
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
    DetectionRule("llama4_json", (_ASKS_FOR_JSON, "<|header_start|>"), shape=JSON_OBJECT),
    DetectionRule("llama4_pythonic", ("[func_name1(", "<|header_start|>"), shape=PYTHON_CALL),
    DetectionRule("llama4_pythonic", ("<|python_start|>",), True),
    DetectionRule("pythonic", ("[func_name1(",), shape=PYTHON_CALL),
    DetectionRule("xlam", ('[{"name": "tool_call_name", "arguments":',), shape=JSON_ARRAY),
    DetectionRule("llama3_json", ("<|python_tag|>",), True),
    DetectionRule("llama3_json", (_ASKS_FOR_JSON,), family=LLAMA_3, shape=JSON_OBJECT),
)

_DEEPSEEK_TURN = f"<{BAR}Assistant{BAR}>"

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
    DetectionRule("hunyuan_a13b", ("</think>", "<|extra_0|>")),
    DetectionRule("granite33", ("<think></think>", "<response></response>")),
    DetectionRule("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    DetectionRule("deepseek_v41", ("</think>", f"{BAR}DSML{BAR} calls", _DEEPSEEK_TURN)),
    DetectionRule("deepseek_v4", ("</think>", f"{BAR}DSML{BAR}", _DEEPSEEK_TURN)),
    DetectionRule("step3", ("</think>", f"<{BAR}tool_calls_begin{BAR}>")),
    DetectionRule("deepseek_v3", ("</think>", f"<{BAR}tool▁sep{BAR}>", "thinking")),
    DetectionRule("deepseek_r1", ("</think>", _DEEPSEEK_TURN)),
    DetectionRule("minimax_m2", ("</think>", "<minimax:tool_call>")),
    DetectionRule("ernie45", ("<response>", "</think>")),
    DetectionRule("glm45", ("</think>", "<arg_key>")),
    DetectionRule("qwen3", ("</think>", "enable_thinking")),
    DetectionRule("olmo3", ("<think>", "<function_calls>")),
    DetectionRule("qwen3", ("<think>",), True),
)


TokenId = Callable[[str], int | None]


def detect(
    template: str | None,
    token_id: TokenId,
    added_tokens: Collection[str] = (),
    round_trip: RoundTrip | None = None,
) -> Detected:
    """Return the formats of a model with this chat template and this vocabulary.

    token_id      returns the id of the token with a given text, or None
    added_tokens  the added tokens of the vocabulary. They show whether markers have a suffix
    round_trip    what the template renders; None if nothing was rendered
    """
    suffix = marker_suffix(added_tokens) or marker_suffix(suffixed_markers(template or ""))
    seen = _Evidence(template, token_id, suffix)
    rendered = round_trip.reasoning() if round_trip else RenderedAnswers()
    reasoning = _choose(REASONING_RULES, seen, rendered)
    rendered = round_trip.calls(reasoning.name) if round_trip else RenderedAnswers()
    tools = _choose(TOOL_RULES, seen, rendered)
    why = f"tool calls: {tools.name or 'none'}, {tools.why}; "
    why += f"reasoning: {reasoning.name or 'none'}, {reasoning.why}"
    return Detected(tools.name, reasoning.name, why, tools.written)


class _Evidence(msgspec.Struct, frozen=True):
    template: str | None
    token_id: TokenId
    suffix: str

    def rendered(self, rule: DetectionRule, turn: WrittenTurn) -> str | None:
        """Return the part of a rendered turn that the rule describes. Return None if the turn has
        no such part, or if the template lacks another sign of the rule."""
        if rule.shape:
            found = re.search(rule.shape.replace("NAME", CALLS[0][0]), turn.answer)
            part = found[0].lstrip(">").strip() if found else None
            others = rule.texts
        else:
            part = next((t for t in self._spellings(rule.texts[0]) if t in turn.text), None)
            others = rule.texts[1:]
        return part if all(map(self.written, others)) else None

    def rank(self, rule: DetectionRule, rendered: str) -> tuple[int, int, int]:
        """Return how well a rule fits a template that renders the text `rendered`: by its markers
        that are rendered, then by those that the source only mentions, then by its other signs."""
        markers = [text for text in rule.texts if not text.isidentifier()]
        num_shown = sum(any(t in rendered for t in self._spellings(text)) for text in markers)
        return num_shown, num_shown - len(markers), len(rule.texts)

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


def _choose(rules: Sequence[DetectionRule], seen: _Evidence, rendered: RenderedAnswers) -> _Choice:
    first = rendered.turns[:1]
    if choice := _by_rendered(rules, seen, rendered, rendered.turns):
        return choice
    if choice := _by_rendered(rules, seen, rendered, first):
        why = f"{choice.why}, of which the format parses only one at a time"
        return msgspec.structs.replace(choice, why=why)
    if first and not any(rendered.parses(name, first[0]) for name in rendered.names):
        return _Choice(None, f"as no format parses the {rendered.kind} that the template renders")
    for rule in rules:
        written = [seen.written(text) for text in rule.texts]
        if all(written):
            why = f"as the chat template writes {_listed(written)}"
            return _Choice(rule.name, why + _in_vocabulary(rule, rules, seen), written=True)
    shapes = [
        msgspec.structs.replace(rule, texts=())
        for rule in rules
        if rule.shape and len(rule.texts) == 1  # the others are about one family of models
    ]
    if choice := _by_rendered(shapes, seen, rendered, first):
        return choice
    return _by_vocabulary(rules, seen)


def _by_rendered(
    rules: Sequence[DetectionRule],
    seen: _Evidence,
    rendered: RenderedAnswers,
    turns: Sequence[WrittenTurn],
) -> _Choice | None:
    """Return the choice among the formats that parse all of `turns`; None if there is none."""
    found = [
        (seen.rank(rule, rendered.text), rule, part)
        for rule in rules
        if turns
        and (part := seen.rendered(rule, turns[0]))
        and all(rendered.parses(rule.name, turn) for turn in turns)
    ]
    if not found:
        return None
    _, rule, part = max(found, key=lambda each: each[0])
    part = part.replace(CALLS[0][0], "NAME")
    signs = rule.texts if rule.shape else rule.texts[1:]
    others = f" and has {_listed(list(map(seen.written, signs)))}" if signs else ""
    why = f"as the chat template writes {part} in rendered {rendered.kind}{others}"
    return _Choice(rule.name, why + _in_vocabulary(rule, rules, seen), written=True)


def _by_vocabulary(rules: Sequence[DetectionRule], seen: _Evidence) -> _Choice:
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
