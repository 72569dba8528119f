"""Measures the default sampling of a small model: how often its answers loop, and what it knows.

    python -m tests.benchmarks.default_sampling [--runs N] [--first N] [--limit N]
        [--threads N] [--only loops|questions] [--sampling '{"temperature": 0.2}' ...]

Each request has the parameters of one `--sampling`, and no defaults. The first one is the one that
the others are compared with. Without `--sampling`, what the page of the default model recommends is
compared with what the catalogue adds to it.

The first table is about open-ended prompts (PROMPTS), which are answered in turn, each time with
another seed. `--first` continues an earlier run of that many answers. An answer loops if it has
`--limit` tokens without an end, and most of its last words repeat earlier ones (`loops`).

The second table is about questions with known answers: facts (tests/data/questions.tsv), and short
texts that contain the answer (`readings`), which a penalty for words of the prompt would spoil.
Each is answered once with each set of parameters, with the same seed, so that a sign test compares
the questions that only one of two sets answers correctly.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from openai import OpenAI

from protocol.engine.model_card import SamplingDefaults
from tests.support.server import Server
from tools.models.catalogue import CATALOGUE, DEFAULT

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.tsv"
PAGE = '{"temperature": 0.2, "top_p": 0.9}'
"""What the page of SmolLM2-135M-Instruct recommends."""
PROMPTS = (
    "Name three fruits, with a table of their colours.",
    "Write a haiku about the sea.",
    "Explain what a tide is to a child.",
    "Write a poem about the sea.",
    "Explain how a computer works.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell me a story about a dragon who is afraid of fire.",
    "Write a Python function that sorts a list of words by their length, with an example.",
    "What are the advantages and disadvantages of solar energy?",
    "Write an email to my landlord about a broken window.",
    "Give me ten ideas for a birthday party.",
    "Explain recursion with an example.",
)
"""The first three are those that the web page suggests."""
BATCH = 64
"""Requests that are sent at the same time."""
TAIL_WORDS = 200
GRAM = 4
"""Words of a sequence that counts as repeated if it occurs earlier in the answer."""
LOOPS_FROM = 0.5
"""Share of repeated sequences among those of the last TAIL_WORDS words from which an answer
loops."""
QUESTION_TOKENS = 200
NUM_READINGS = 100
PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas")
THINGS = ("bicycle", "lamp", "violin", "boat", "hat", "clock", "kite", "basket", "mirror", "ladder")
PLACES = ("garden", "kitchen", "attic", "harbour", "library", "garage", "cellar", "market")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int
    #: Whether the limit of tokens has ended it.
    is_cut: bool


Ask = Callable[[str, int, int], Answer]
"""Returns the answer to a prompt with a seed and a limit of tokens."""


# ---- open-ended prompts


def loops(answer: Answer) -> bool:
    """Return whether the answer would not have ended, because it repeats itself."""
    words = answer.text.split()
    grams = [tuple(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)]
    tail = max(0, len(grams) - TAIL_WORDS)
    seen = set(grams[:tail])
    repeated = 0
    for gram in grams[tail:]:
        repeated += gram in seen
        seen.add(gram)
    return answer.is_cut and repeated >= LOOPS_FROM * max(1, len(grams) - tail)


def print_loops(name: str, answers: Sequence[Answer]) -> None:
    num_loops, num_cut = sum(map(loops, answers)), sum(each.is_cut for each in answers)
    tokens = median(each.num_tokens for each in answers)
    print(
        f"{num_loops:4} of {len(answers)} loop ({num_loops / len(answers):5.1%})"
        f"   {num_cut:4} at the limit   {tokens:5.0f} tokens (median)   {name}",
        flush=True,
    )


# ---- questions


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    #: An answer is right if it contains one of these as whole words, in any case.
    expected: Sequence[str]

    def is_right(self, answer: Answer) -> bool:
        words = "|".join(map(re.escape, self.expected))
        return re.search(rf"(?<!\w)(?:{words})(?!\w)", answer.text, re.IGNORECASE) is not None


def facts() -> list[Question]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    parts = (line.split("\t") for line in lines)
    return [Question(text, expected.split("|")) for text, expected in parts]


def readings() -> list[Question]:
    """Return questions about a text of three sentences, one of which has the answer."""
    chance = random.Random(1)
    found = []
    for _ in range(NUM_READINGS):
        people, things = chance.sample(PEOPLE, 3), chance.sample(THINGS, 3)
        rows = list(zip(people, things, chance.sample(PLACES, 3), strict=True))
        text = " ".join(f"{who} left the {what} in the {where}." for who, what, where in rows)
        who, what, where = chance.choice(rows)
        asked, expected = chance.choice(
            ((f"Where did {who} leave the {what}?", where), (f"Who left the {what}?", who))
        )
        found.append(Question(f"{text} {asked} Answer in one sentence.", (expected,)))
    return found


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided probability of a difference of this size or more between the numbers of
    questions that only one of two sets answers, if both sets answer equally well."""
    total = gained + lost
    tail = sum(comb(total, count) for count in range(max(gained, lost), total + 1))
    return min(1.0, 2 * tail / 2**total)


def print_questions(name: str, right: Sequence[bool], first: Sequence[bool]) -> None:
    gained = sum(now and not before for now, before in zip(right, first, strict=True))
    lost = sum(before and not now for now, before in zip(right, first, strict=True))
    print(
        f"{sum(right):4} of {len(right)} right   {gained:3} gained, {lost:3} lost"
        f"   p {sign_test(gained, lost):.2f}   {name}",
        flush=True,
    )


# ---- the server


def asker(client: OpenAI, sampling: dict[str, Any]) -> Ask:
    def ask(prompt: str, seed: int, limit: int) -> Answer:
        found = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": prompt}],
            seed=seed,
            max_tokens=limit,
            extra_body=sampling,
        )
        (choice,) = found.choices
        assert found.usage is not None
        return Answer(
            choice.message.content or "",
            found.usage.completion_tokens,
            choice.finish_reason == "length",
        )

    return ask


def in_batches(ask: Ask, prompts: Sequence[str], limit: int, first: int = 0) -> list[Answer]:
    """Return the answers to all prompts. The seed of a prompt is its place, from `first`."""
    seeds = range(first, first + len(prompts))
    with ThreadPoolExecutor(BATCH) as pool:
        return list(pool.map(ask, prompts, seeds, [limit] * len(prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampling", action="append")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", choices=("loops", "questions"))
    options = parser.parse_args()
    catalogue = CATALOGUE[DEFAULT].sampling
    names = options.sampling or [PAGE, json.dumps(catalogue.set_values())]
    neutral = json.dumps(SamplingDefaults().effective_values())
    arguments = ["--served-name", "model", "--max-slots", str(BATCH), "--default-sampling", neutral]
    arguments += ["--threads", str(options.threads)]
    runs = range(options.first, options.first + options.runs)
    prompts = [PROMPTS[run % len(PROMPTS)] for run in runs]
    questions = [*facts(), *readings()]
    with (
        Server(*arguments, model=DEFAULT) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1200) as client,
    ):
        asks = {name: asker(client, json.loads(name)) for name in names}
        if options.only != "questions":
            for name, ask in asks.items():
                print_loops(name, in_batches(ask, prompts, options.limit, options.first))
        if options.only != "loops":
            first: list[bool] = []
            texts = [question.text for question in questions]
            for name, ask in asks.items():
                answers = in_batches(ask, texts, QUESTION_TOKENS)
                right = [q.is_right(a) for q, a in zip(questions, answers, strict=True)]
                first = first or right
                print_questions(name, right, first)


if __name__ == "__main__":
    main()
