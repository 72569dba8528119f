"""Measures whether rounding costs right answers: the default settings against float32.

    python -m tests.benchmarks.rounding_quality [--options '--activations bfloat16'] [--exact ...]

Each server of the default model answers the same 300 questions greedily. Their answers are short
and known: facts (tests/data/questions.tsv), and tasks that this script makes (sums, opposites,
spelling, copying, lists, fields of JSON). A sign test compares the questions that only one of the
two servers answers correctly. The perplexity of texts is measured by `tests.benchmarks.perplexity`.
"""

from __future__ import annotations

import argparse
import random
import shlex
from collections.abc import Sequence

from openai import OpenAI

from tests.benchmarks.default_sampling import (
    BATCH,
    Question,
    asker,
    facts,
    in_batches,
    print_questions,
)
from tests.support.server import Server
from tools.models.catalogue import DEFAULT

NUM_QUESTIONS = 300
ANSWER_TOKENS = 48
GREEDY = {"temperature": 0.0, "frequency_penalty": 0.0}
OPPOSITES = (
    *("hot cold", "big small|little", "up down", "day night", "black white", "happy sad|unhappy"),
    *("fast slow", "rich poor", "open closed|close|shut", "full empty", "hard soft|easy"),
    *("old young|new", "early late", "wet dry", "strong weak", "light dark|heavy", "left right"),
    *("clean dirty", "loud quiet|silent|soft", "true false"),
)
WORDS = (
    *("apple", "river", "stone", "tiger", "cloud", "bread", "chair", "music", "green", "seven"),
    *("house", "light", "plant", "water", "snake", "paper", "table", "grape", "ocean", "horse"),
)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
TOWNS = ("Lyon", "Porto", "Graz", "Turin", "Ghent", "Basel", "Leeds", "Cadiz")


def made_questions(count: int) -> list[Question]:
    """Return `count` questions that are made of words and numbers, of all kinds in turn."""
    chance = random.Random(2)
    makers = (_addition, _opposite, _spelling, _copy, _list_item, _json_field)
    return [makers[number % len(makers)](chance) for number in range(count)]


def _addition(chance: random.Random) -> Question:
    one, other = chance.randint(1, 20), chance.randint(1, 20)
    return Question(f"What is {one} + {other}?", (str(one + other),))


def _opposite(chance: random.Random) -> Question:
    word, expected = chance.choice(OPPOSITES).split()
    return Question(f'What is the opposite of "{word}"?', expected.split("|"))


def _spelling(chance: random.Random) -> Question:
    word = chance.choice(WORDS)
    letters = "-".join(word)
    return Question(f"Spell the word {word}, with a hyphen between letters.", (letters,))


def _copy(chance: random.Random) -> Question:
    words = " ".join(chance.sample(WORDS, 4))
    return Question(f"Repeat these words exactly: {words}", (words,))


def _list_item(chance: random.Random) -> Question:
    words = chance.sample(WORDS, 4)
    place = chance.randrange(4)
    nth = ("first", "second", "third", "last")[place]
    return Question(f"What is the {nth} word of this list? {', '.join(words)}", (words[place],))


def _json_field(chance: random.Random) -> Question:
    name, town, age = chance.choice(NAMES), chance.choice(TOWNS), chance.randint(20, 80)
    asked, expected = chance.choice((("name", name), ("town", town), ("age", str(age))))
    text = f'{{"name": "{name}", "town": "{town}", "age": {age}}}'
    return Question(f'What is the value of "{asked}" in this JSON? {text}', (expected,))


def right_answers(options: Sequence[str], questions: Sequence[Question]) -> list[bool]:
    """Return which questions a server with these options answers correctly."""
    arguments = ["--served-name", "model", "--max-slots", str(BATCH), *options]
    with (
        Server(*arguments, model=DEFAULT) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1200) as client,
    ):
        texts = [question.text for question in questions]
        answers = in_batches(asker(client, GREEDY), texts, ANSWER_TOKENS)
    return [q.is_right(a) for q, a in zip(questions, answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rounding_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--options", default="", help="options of the server (default: none)")
    parser.add_argument("--exact", default="--dtype float32", help="options of the exact server")
    options = parser.parse_args()
    known = facts()
    questions = [*known, *made_questions(NUM_QUESTIONS - len(known))]
    first: list[bool] = []
    for name in (options.exact, options.options):
        right = right_answers(shlex.split(name), questions)
        first = first or right
        print_questions(name or "default settings", right, first)


if __name__ == "__main__":
    main()
