"""The prompts of a benchmark: an endless sequence determined by the seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tools.bench.config import BenchConfig
from tools.failure import Failure

PROBE_TOKENS = 8
PROBE_RUN = -1
"""Number of the run that the probe belongs to; real runs count from 0."""
FIRST_ID = 1 / 20
"""The lowest random token id, as a share of the vocabulary. Special tokens and single bytes usually
have lower ids.
"""
WORDS = (
    "the of and to in is that it for was on are as with they be at one have this from or had by "
    "but some what there we can out other were all your when up use how said an each she which do "
    "their time if will way about many then them would write like so these her long make thing see "
    "him two has look more day could go come did my sound no most number who over know water than "
    "call first people may down side been now find any new work part take get place made live where"
)
"""Words that, with a space before them, are one token in the tokenizers of all common models."""


class BenchPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request: either a `prompt` (text or token ids), or `messages`."""

    output_tokens: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


def prompts(config: BenchConfig, seed: int, number: int) -> Iterator[BenchPrompt]:
    """Return the endless sequence of prompts of run `number`.

    All runs with the same seed use the same shared prefixes. Apart from these, their prompts
    differ, so no run finds a prompt of another run in the prefix cache. With --file, all runs use
    the prompts in the file. Raises Failure if the file cannot be used.
    """
    if config.dataset == "file":
        return itertools.cycle(read_file(Path(config.file), config))
    return _random_prompts(config, seed, number)


def probe(config: BenchConfig, seed: int) -> BenchPrompt:
    """Return a prompt of the benchmark's kind for a trial request: a short one without a shared
    prefix, or, with --file, the first prompt of the file's sequence."""
    if config.dataset == "file":
        return next(prompts(config, seed, 0))
    short = msgspec.structs.replace(config, dataset="random", input_tokens=PROBE_TOKENS, spread=0.0)
    return next(_random_prompts(short, seed, PROBE_RUN))


def _random_prompts(config: BenchConfig, seed: int, number: int) -> Iterator[BenchPrompt]:
    own = random.Random(f"{seed}/{number}")  # for the prompts of this run only
    prefixes: list[list[Any]] = [[]]
    if config.dataset == "shared-prefix":
        shared = random.Random(f"{seed}/prefixes")
        prefixes = [_tokens(config, shared, config.prefix_tokens) for _ in range(config.prefixes)]
    while True:
        prefix = own.choice(prefixes)
        tokens = prefix + _tokens(config, own, _length(config.input_tokens, config.spread, own))
        output_tokens = _length(config.output_tokens, config.spread, own)
        if config.sends_ids:
            yield BenchPrompt(prompt=tokens, output_tokens=output_tokens)
        else:
            yield _text(" ".join(tokens), output_tokens, config.api)


def _tokens(config: BenchConfig, source: random.Random, count: int) -> list[Any]:
    """Return `count` random token ids, or as many random words of about one token each."""
    if config.sends_ids:
        lowest = int(config.vocabulary * FIRST_ID)
        return [source.randrange(lowest, config.vocabulary) for _ in range(count)]
    return source.choices(WORDS.split(), k=count)


def _length(middle: int, spread: float, source: random.Random) -> int:
    return max(1, source.randint(round(middle * (1 - spread)), round(middle * (1 + spread))))


def _text(text: str, output_tokens: int, api: str) -> BenchPrompt:
    if api == "chat":
        return BenchPrompt(
            messages=[{"role": "user", "content": text}], output_tokens=output_tokens
        )
    return BenchPrompt(prompt=text, output_tokens=output_tokens)


# ---- a file of prompts


class DatasetLine(msgspec.Struct, kw_only=True):
    """A line of a file of prompts. It has exactly one of the first three fields."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[dict[str, str]] | None = None
    max_tokens: msgspec.UnsetType | int = msgspec.UNSET


def read_file(path: Path, config: BenchConfig) -> Sequence[BenchPrompt]:
    """Return the prompts in a file. Raises Failure if the file cannot be read, has no prompts, or
    has a bad line, whose number the error names."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise Failure(f"cannot read --file: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_to_prompt(msgspec.json.decode(line, type=DatasetLine), config))
        except (msgspec.MsgspecError, ValueError) as error:
            raise Failure(f"{path}, line {number}: {error}") from None
    if not found:
        raise Failure(f"{path} contains no prompts")
    return found


def _to_prompt(line: DatasetLine, config: BenchConfig) -> BenchPrompt:
    output_tokens = line.max_tokens or config.output_tokens
    messages = line.messages
    if line.conversations is not None:
        messages = _up_to_the_first_answer(line.conversations)
    if (line.prompt is None) == (messages is None):
        raise ValueError("must have exactly one of `prompt`, `messages` and `conversations`")
    if line.prompt is not None:
        return _text(line.prompt, output_tokens, config.api)
    if config.api != "chat":
        raise ValueError("a conversation requires --api chat")
    return BenchPrompt(messages=messages, output_tokens=output_tokens)


def _up_to_the_first_answer(conversation: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the messages before the first answer of a conversation. The conversation is in
    ShareGPT's format, with turns such as {"from": "human", "value": ...}."""
    roles = {"system": "system", "human": "user", "user": "user"}
    turns = itertools.takewhile(lambda turn: turn.get("from") in roles, conversation)
    messages = [{"role": roles[turn["from"]], "content": turn.get("value", "")} for turn in turns]
    if not messages:
        raise ValueError("the conversation does not start with a human or system turn")
    return messages
