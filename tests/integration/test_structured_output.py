"""Constrained answers of a model with the default model's tokenizer and random weights, and of a
real engine that compiles grammars while it streams.

Clients of the default model get constrained answers in tests/e2e/test_sdk_sessions.py.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator

import pytest
import tokenizers

from protocol.engine.grammar import Body, ChoiceGrammar, Grammar, JsonSchema, Regex, Thinking
from protocol.engine.sampling import SamplingParams
from protocol.sdk.client import Client
from tests.support.grammars import schema, signs_tokenizer, text_of
from tests.support.processes import Program
from tests.support.replica import Replica, load
from tests.support.tiny_checkpoint import write_babbling_llama, write_tiny_llama

# ---- the tokens of the default model


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    loaded = load(write_babbling_llama(tmp_path_factory.mktemp("babbling")))
    return Replica(loaded, max_slots=100)


@pytest.fixture(scope="module")
def tokenizer(replica: Replica) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(replica.loaded.card.tokenizer)


Ask = Callable[..., list[str]]
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"


@pytest.fixture(scope="module")
def ask(replica: Replica, tokenizer: tokenizers.Tokenizer) -> Ask:
    def answers(question: str, grammar: Grammar, count: int, max_tokens: int = 150) -> list[str]:
        """Return answers at temperature 1. Checks that the finish reason of all is "stop"."""
        chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(chat).ids
        numbers = []
        for seed in range(count):
            params = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
            numbers.append(replica.add(prompt, params, grammar))
        replica.run()
        ends = [replica.outputs[number][-1] for number in numbers]
        assert {end.finish for end in ends} == {"stop"}, [end.error for end in ends]
        return [tokenizer.decode(replica.tokens(number)) for number in numbers]

    return answers


PERSON = {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and type(person["name"]) is str
        and len(person["name"]) <= 12
        and type(person["age"]) is int
        and 0 <= person["age"] <= 130
        and len(person["tags"]) <= 2
        and set(person["tags"]) <= {"a", "b"}
    )


def test_a_hundred_answers_of_a_hundred_satisfy_their_schema(ask: Ask) -> None:
    grammar = Grammar(body=JsonSchema(text=schema(**PERSON)))
    answers = ask("Invent a person, as JSON.", grammar, 100)
    assert [text for text in answers if not is_person(text)] == []
    assert len(set(answers)) > 90, "a grammar must not make answers alike"


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        (Regex(pattern=DATE), DATE),
        (ChoiceGrammar(choices=["yes", "no", "it depends"]), "yes|no|it depends"),
    ],
    ids=["regex", "choice"],
)
def test_a_hundred_answers_of_a_hundred_match(ask: Ask, body: Body, pattern: str) -> None:
    answers = ask("When was the first flight? Was it long?", Grammar(body=body), 100)
    assert [text for text in answers if not re.fullmatch(pattern, text)] == []
    assert len(set(answers)) > 1


def test_thinking_before_the_body_may_have_any_length(
    replica: Replica, tokenizer: tokenizers.Tokenizer
) -> None:
    """One of the model's markers ends the thinking; a bias makes it likely."""
    closes = "<file_sep>"
    thinking = Thinking(closes=closes, inside=True)
    grammar = Grammar(body=ChoiceGrammar(choices=["yes", "no"]), thinking=thinking)
    prompt = tokenizer.encode("<|im_start|>assistant\nLet me think.").ids
    marker = tokenizer.token_to_id(closes)
    assert marker is not None
    numbers = []
    for seed in range(16):
        params = SamplingParams(
            temperature=1.0, max_tokens=200, seed=seed, logit_bias={marker: 8.0}
        )
        numbers.append(replica.add(prompt, params, grammar))
    replica.run()
    thoughts = set()
    for number in numbers:
        assert replica.outputs[number][-1].finish == "stop"
        text = tokenizer.decode(replica.tokens(number), skip_special_tokens=False)
        thought, body = text.split(closes)
        assert body.strip() in ("yes", "no")
        thoughts.add(thought)
    assert len(thoughts) > 1


# ---- a real engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client of an engine with a tiny model, whose tokens are single characters."""
    folder = tmp_path_factory.mktemp("signs")
    checkpoint = write_tiny_llama(folder, max_position_embeddings=2000, eos_token_id=0)
    (checkpoint / "tokenizer.json").write_bytes(signs_tokenizer(markers=False))
    address = f"ipc://{folder}/run/engine.sock"
    worker = {
        "dtype": "float32",
        "poison_slots": "wild",
        "max_slots": 8,
        "kv_blocks": 257,
        "threads": 1,
    }
    config = {"address": address, "worker": {"model": str(checkpoint), **worker}}
    (folder / "run").mkdir(mode=0o700)
    folder.chmod(0o700)
    with (
        Program(["-P", "-m", "engine_core", "--config", json.dumps(config)]),
        Client(address, wait_s=60) as client,
    ):
        yield client


def test_the_engine_enforces_a_clients_grammar(engine: Client) -> None:
    grammar = Grammar(body=Regex(pattern="[ab]{5,9}c"))
    generations = [engine.generate([5, seed], grammar=grammar, seed=seed) for seed in range(1, 30)]
    answers = [text_of(generation.tokens()) for generation in generations]
    assert all(re.fullmatch("[ab]{5,9}c", answer) for answer in answers)
    assert len(set(answers)) > 5


def test_many_clients_with_many_grammars_at_once(engine: Client) -> None:
    patterns = [f"[ab]{{{n}}}c" for n in range(1, 9)]
    answers: dict[str, list[str]] = {pattern: [] for pattern in patterns}

    def work(pattern: str) -> None:
        for seed in range(5):
            grammar = Grammar(body=Regex(pattern=pattern))
            answer = engine.generate([seed + 1], grammar=grammar, seed=seed)
            answers[pattern].append(text_of(answer.tokens()))

    threads = [threading.Thread(target=work, args=(pattern,)) for pattern in patterns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pattern, texts in answers.items():
        assert len(texts) == 5
        assert all(re.fullmatch(pattern, text) for text in texts)
