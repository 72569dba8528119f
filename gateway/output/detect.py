"""Which formats a model writes, guessed from its chat template and its vocabulary.

A template that can render calls or reasoning spells the markers of the model's own format; the more
peculiar they are, the surer the guess. Rules are tried in order, the peculiar ones first, and the
first that fits decides. They are tried three times, each time with weaker evidence:

    the chat template writes all of a rule's signs
    the template writes them or the vocabulary has them as tokens, if no other model has such tokens
    the vocabulary has the tokens of a family of models

Every choice is explained, also where the vocabulary speaks for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from gateway.output.suffix import spelt_in, suffix_in

BAR = "\uff5c"
ANY = ":*"
"""In a sign: the suffix that this checkpoint's markers have. Without one there is no such sign."""


class Rule(msgspec.Struct, frozen=True):
    """The format `name`, if all signs are seen.

    texts   signs that the template writes
    alone   they are so peculiar that the vocabulary may have them instead
    family  tokens that say so too, with nothing in the template
    """

    name: str
    texts: tuple[str, ...]
    alone: bool = False
    family: tuple[str, ...] = ()


class Detected(msgspec.Struct, frozen=True):
    """Names for `formats.format_of`, and the reason in one sentence.

    written  the format of tool calls is one that the chat template writes
    """

    tools: str | None
    reasoning: str | None
    why: str
    written: bool = False


LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

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
    Rule("hy_v3", (f"<tool_calls{ANY}>", f"<tool_sep{ANY}>"), True),
    Rule("hy_v4", (f"<tool_calls{ANY}>",), True),
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
    Rule("llama3_json", ('{"name": function name, "parameters":',), family=LLAMA_3),
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
    Rule("hy_v3", (f"<think{ANY}>", f"<tool_sep{ANY}>"), True),
    Rule("hy_v4", (f"<think{ANY}>",), True),
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


TokenId = Callable[[str], int | None]


def detect(template: str | None, token_id: TokenId, added_tokens: Collection[str] = ()) -> Detected:
    """What to call the formats of a model with this chat template and this vocabulary.

    token_id      of a token by its spelling; None where there is none
    added_tokens  of the vocabulary, in which markers may have a suffix
    """
    suffix = suffix_in(added_tokens) or suffix_in(spelt_in(template or ""))
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
        """The sign as the template writes it."""
        return next((t for t in self._spellings(sign) if t in (self.template or "")), None)

    def token(self, sign: str) -> str | None:
        """The sign as it is a token."""
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


def _choose(rules: Sequence[Rule], seen: _Evidence) -> _Choice:
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


def _in_vocabulary(rule: Rule, rules: Sequence[Rule], seen: _Evidence) -> str:
    """What the vocabulary says to a choice that the template has made."""
    if tokens := [token for text in rule.texts if (token := seen.token(text))]:
        return f" ({_listed(tokens)} in the vocabulary, too)"
    for other in rules:
        if other.alone and other.name != rule.name and all(map(seen.token, other.texts)):
            tokens = [seen.token(text) or "" for text in other.texts]
            return f" (though the vocabulary has {_listed(tokens)}, as {other.name} would)"
    return ""


def _mixed(rule: Rule, seen: _Evidence) -> str:
    written = [text for text in map(seen.written, rule.texts) if text]
    tokens = [seen.token(text) for text in rule.texts if not seen.written(text)]
    writes = f"the chat template writes {_listed(written)} and " if written else ""
    return f"as {writes}the vocabulary has {_listed(tokens)}"


def _listed(texts: Sequence[str | None]) -> str:
    return " and ".join(map(str, texts))
