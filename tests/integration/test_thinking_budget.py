"""Thinking budgets of a model with the default model's tokenizer and random weights. The masks are
real, and the sampled tokens often end in the middle of a character."""

from __future__ import annotations

import codecs
import json

import pytest
import tokenizers

from protocol.engine.grammar import ChoiceGrammar, Grammar, JsonSchema, Thinking, ThinkingBudget
from protocol.engine.sampling import SamplingParams
from tests.support.grammars import schema
from tests.support.replica import Replica, load
from tests.support.tiny_checkpoint import write_babbling_llama
from tests.support.tokenizers import tokenizer_of

ANSWERS = 12
BUDGET = 20
TOKEN, SPELT = "<file_sep>", "</think>"
"""Texts that close the thinking: one is a token of the model, one is not."""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    return Replica(load(write_babbling_llama(tmp_path_factory.mktemp("babbling"))))


def thoughts(replica: Replica, grammar: Grammar, prompt: str, closes: str) -> list[tuple[int, str]]:
    """Return the number of tokens of each answer's thinking, and the text after the thinking."""
    tokenizer = tokenizers.Tokenizer.from_buffer(replica.loaded.card.tokenizer)
    ids = tokenizer.encode(prompt).ids
    numbers = []
    for seed in range(ANSWERS):
        params = SamplingParams(temperature=1.0, max_tokens=60, seed=seed, ignore_eos=True)
        numbers.append(replica.add(ids, params, grammar))
    replica.run()
    answers = []
    for number in numbers:
        assert replica.outputs[number][-1].finish in ("stop", "length")
        tokens = replica.tokens(number)
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        check_last_character(tokens, closes)
        texts = [tokenizer.decode(tokens[:n], skip_special_tokens=False) for n in range(61)]
        begins = next((n for n, text in enumerate(texts) if text.endswith(closes)), None)
        assert begins is not None, whole
        answers.append((begins - len(tokenizer.encode(closes).ids), whole.partition(closes)[2]))
    return answers


def check_last_character(tokens: list[int], closes: str) -> None:
    """Check that the bytes before `closes` do not end within a character."""
    text_of = tokenizer_of("smollm2").token_bytes
    thought, _, _ = b"".join(map(text_of, tokens)).partition(closes.encode())
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(thought)
    rest, _ = decoder.getstate()
    assert not rest, f"a character was cut: {thought!r}"


PROMPT = "<|im_start|>user\nWhat is 2 + 2? 😀<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("closes", [TOKEN, SPELT])
def test_the_model_answers_after_its_thinking_budget(replica: Replica, closes: str) -> None:
    limit = ThinkingBudget(most=BUDGET, closes=[closes], opens=["<think>"], inside=True)
    answers = thoughts(replica, Grammar(budget=limit), PROMPT + "<think>Well,", closes)
    assert {spent for spent, _ in answers} <= set(range(BUDGET, BUDGET + 4)), "or a character more"
    assert len({text for _, text in answers}) == ANSWERS
    assert all(text for _, text in answers)


@pytest.mark.parametrize("closes", [TOKEN, SPELT])
@pytest.mark.parametrize("inside", [True, False])
def test_an_answer_after_the_budget_keeps_to_its_form(
    replica: Replica, closes: str, inside: bool
) -> None:
    form = JsonSchema(text=schema(sum={"type": "integer", "minimum": 0, "maximum": 99}))
    opens = "<think>"
    grammar = Grammar(
        body=form,
        thinking=Thinking(opens=opens, closes=closes, inside=inside),
        budget=ThinkingBudget(most=BUDGET, closes=[closes], opens=[opens], inside=inside),
    )
    answers = thoughts(replica, grammar, PROMPT + (opens if inside else ""), closes)
    for _, text in answers:
        assert json.loads(text).keys() == {"sum"}
    more = 3 if inside else 13  # the rest of a character; "<think>" sampled piece by piece
    assert [spent for spent, _ in answers if not BUDGET <= spent <= BUDGET + more] == []


def test_no_budget_at_all_is_an_answer_at_once(replica: Replica) -> None:
    grammar = Grammar(
        body=ChoiceGrammar(choices=["four", "five"]),
        thinking=Thinking(closes=TOKEN, inside=True),
        budget=ThinkingBudget(most=0, closes=[TOKEN], inside=True),
    )
    answers = thoughts(replica, grammar, PROMPT, TOKEN)
    assert {spent for spent, _ in answers} == {0}
    assert {text.strip() for _, text in answers} <= {"four", "five"}
