"""Grammars in the engine: requests that wait for them, masks of a step, and ends of answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine_core.admission.grammar_cache import (
    MAX_KEPT_BYTES,
    MAX_PENDING,
    MAX_PENDING_CHARS,
    MAX_TEMPLATE_BYTES,
    MAX_USED_BYTES,
    MIN_TEMPLATE_BYTES,
    GrammarCache,
)
from engine_core.grammar.jobs import RETRY_S, CompiledGrammar
from engine_core.grammar.matcher import Matcher
from protocol.engine.grammar import ChoiceGrammar, Grammar, JsonSchema, Lark, Regex, Thinking
from protocol.engine.messages import Accepted, Account, Refused
from protocol.wire import codec
from protocol.wire.arrays import Int32
from protocol.wire.errors import Overloaded
from protocol.worker.steps import StepPlan, StepResult
from tests.support.engines import CLIENT, EOS, Bench, echo_compiler
from tests.support.grammars import ids_of, schema, text_of

WORD = Regex(pattern="[ab]{3,9}c")
PROMPT = [5, 6, 7]


def add_compiled(
    bench: Bench, *prompts: list[int], grammar: Any = WORD, **params: Any
) -> list[int]:
    """Add requests with one grammar, and compile it. Return their numbers."""
    numbers = [bench.add(prompt, grammar=grammar, **params) for prompt in prompts or (PROMPT,)]
    while bench.jobs:
        bench.compile()
    return numbers


def answer_text(bench: Bench, number: int) -> str:
    return text_of(bench.tokens(number))


# ---- requests that wait for a grammar
def test_a_request_is_accepted_when_its_grammar_is_compiled_and_not_before() -> None:
    bench = Bench()
    number = bench.add(PROMPT, grammar=WORD)
    assert bench.step() is None, "nothing may be computed yet"
    assert bench.compile() == {number: Accepted(request=number)}
    bench.run()
    assert re.fullmatch("[ab]{3,9}c", answer_text(bench, number))


def test_other_requests_run_while_a_grammar_is_compiled() -> None:
    bench = Bench()
    bench.add(PROMPT, grammar=WORD)
    other = bench.add([9, 9], max_tokens=4, ignore_eos=True)
    bench.run()
    assert bench.last_output(other).finish == "length"
    assert not bench.engine.is_idle


def test_a_grammar_is_compiled_once_for_all_requests() -> None:
    bench = Bench()
    early = [bench.add(PROMPT, grammar=WORD) for _ in range(3)]
    assert len(bench.jobs) == 1
    assert list(bench.compile()) == early
    late = bench.add(PROMPT, grammar=Regex(pattern=WORD.pattern))
    assert bench.jobs == []
    bench.run()
    assert len({answer_text(bench, number) for number in (*early, late)}) == 1


def test_a_bad_grammar_refuses_only_the_requests_that_use_it() -> None:
    bench = Bench()
    bad = [bench.add(PROMPT, grammar=JsonSchema(text='{"not":{}}')) for _ in range(2)]
    good = bench.add(PROMPT, grammar=WORD)
    replies = bench.compile()
    assert list(replies) == bad
    for reply in replies.values():
        assert isinstance(reply, Refused)
        assert (reply.error.code, reply.error.param) == ("invalid_request", "grammar")
        assert "not" in reply.error.message
    bench.compile()
    bench.run()
    assert bench.last_output(good).finish == "stop"
    stats = bench.engine.stats()
    assert (stats.num_accepted, stats.num_refused) == (1, 2)
    assert bench.engine.is_idle


def test_a_bad_grammar_is_compiled_again_for_the_next_request() -> None:
    bench = Bench()
    for _ in range(2):
        bench.add(PROMPT, grammar=Regex(pattern="["))
        assert len(bench.jobs) == 1
        bench.compile()


def test_a_grammar_out_of_bounds_is_refused_at_once() -> None:
    bench = Bench()
    reply = bench.refusal(PROMPT, grammar=ChoiceGrammar(choices=[]))
    assert (reply.error.param, bench.jobs) == ("grammar", [])


def test_an_abort_during_the_compilation_is_the_requests_only_end() -> None:
    bench = Bench()
    number, other = bench.add(PROMPT, grammar=WORD), bench.add(PROMPT, grammar=WORD)
    bench.abort(number)
    assert bench.last_output(number).finish == "abort"
    assert list(bench.compile()) == [other]
    bench.run()
    assert len(bench.outputs[CLIENT, number]) == 1
    stats = bench.engine.stats()
    assert (stats.num_accepted, stats.num_finished) == (2, {"abort": 1, "stop": 1})


def test_a_lost_clients_pending_requests_are_dropped() -> None:
    bench = Bench()
    bench.add(PROMPT, grammar=WORD)
    bench.engine.on_client_lost(CLIENT)
    assert bench.engine.is_idle
    assert bench.compile() == {}
    bench.add(PROMPT, grammar=WORD)
    assert bench.jobs == [], "the grammar was compiled and cached"


def test_a_drain_waits_for_grammars() -> None:
    bench = Bench()
    number = bench.add(PROMPT, grammar=WORD)
    bench.engine.drain()
    assert not bench.engine.is_idle
    bench.compile()
    bench.run()
    assert bench.last_output(number).finish == "stop"
    assert bench.engine.is_idle


def test_requests_that_wait_for_grammars_count_as_waiting() -> None:
    bench = Bench(max_waiting=2)
    for _ in range(2):
        bench.add(PROMPT, grammar=WORD)
    for grammar in (WORD, None):
        reply = bench.refusal(PROMPT, grammar=grammar)
        assert reply.error.code == Overloaded.code


# ---- each step
def test_a_step_without_grammars_has_the_bytes_of_an_engine_without_grammars() -> None:
    plain, other = Bench(), Bench()
    other.abort(*add_compiled(other))
    streams = []
    for bench in (plain, other):
        bench.add([1, 2, 3, 4, 5], max_tokens=5, ignore_eos=True)
        sent: list[bytes] = []
        while (plan := bench.plan()) is not None:
            assert bench.masks is None, "no second message"
            sent.append(b"".join(codec.encode(plan)))
            bench.finish()
        streams.append(sent)
    assert len(streams[0]) == 5
    assert streams[0] == streams[1]
    assert not any(b"masked" in frame for frame in streams[0])


def test_masks_are_for_the_constrained_rows_that_are_sampled() -> None:
    bench = Bench(token_budget=8, prefix_cache=False)
    free = bench.add([1], ignore_eos=True, max_tokens=9)
    (bound,) = add_compiled(bench, [2] * 10, max_tokens=4)
    seen = []
    while (plan := bench.plan()) is not None:
        seen.append(
            (plan.row_samples.tolist(), None if plan.masked is None else plan.masked.tolist())
        )
        assert (bench.masks is None) == (plan.masked is None)
        bench.finish()
    assert seen[:4] == [([1, 0], None), ([1, 1], [1]), ([1, 1], [1]), ([1, 1], [1])]
    assert bench.last_output(free).finish == "length"
    assert re.fullmatch("[ab]{4}", answer_text(bench, bound))


def test_many_constrained_answers_in_one_batch_keep_to_their_own_grammars() -> None:
    bench = Bench()
    grammars = [
        WORD,
        ChoiceGrammar(choices=["yes", "no"]),
        JsonSchema(text=schema(x={"enum": ["a", "b"]})),
        Lark(text='start: "<" start ">" | "."'),
    ]
    numbers = [
        add_compiled(bench, [3, n], grammar=g, seed=n)[0] for n, g in enumerate(grammars * 2)
    ]
    bench.run()
    patterns = ["[ab]{3,9}c", "yes|no", r'\{\s*"x"\s*:\s*"[ab]"\s*\}', r"<*\.>*"]
    for number, pattern in zip(numbers, patterns * 2, strict=True):
        assert bench.last_output(number).finish == "stop"
        assert re.fullmatch(pattern, answer_text(bench, number))


# ---- the end
def test_a_complete_answer_ends_without_a_stop_token() -> None:
    bench = Bench()
    (number,) = add_compiled(bench, grammar=ChoiceGrammar(choices=["yes", "yea"]))
    bench.run()
    end = bench.last_output(number)
    assert (end.finish, end.stop_token) == ("stop", None)
    assert answer_text(bench, number) in ("yes", "yea")


def test_an_answer_that_could_continue_ends_with_a_reported_stop_token() -> None:
    bench = Bench()
    numbers = add_compiled(
        bench, *([n] for n in range(1, 30)), grammar=Regex(pattern="a+"), max_tokens=90
    )
    bench.run()
    ends = [bench.last_output(number) for number in numbers]
    assert {(end.finish, end.stop_token) for end in ends} == {("stop", EOS)}
    for number in numbers:
        assert re.fullmatch("a+", answer_text(bench, number))


def test_ignore_eos_does_not_continue_a_complete_answer() -> None:
    bench = Bench()
    (fixed,) = add_compiled(bench, grammar=ChoiceGrammar(choices=["yes"]), ignore_eos=True)
    numbers = add_compiled(
        bench, *([n] for n in range(1, 9)), grammar=Regex(pattern="a+"), ignore_eos=True
    )
    bench.run()
    assert answer_text(bench, fixed) == "yes"
    for number in numbers:
        assert (bench.last_output(number).finish, bench.last_output(number).stop_token) == (
            "stop",
            EOS,
        )


def test_max_tokens_cuts_an_incomplete_answer() -> None:
    bench = Bench()
    cut, whole = add_compiled(bench, [1], [1], grammar=ChoiceGrammar(choices=["yes"]), max_tokens=2)
    bench.run()
    assert (bench.last_output(cut).finish, answer_text(bench, cut), answer_text(bench, whole)) == (
        "length",
        "ye",
        "ye",
    )
    (exact,) = add_compiled(bench, grammar=ChoiceGrammar(choices=["yes"]), max_tokens=3)
    bench.run()
    assert (bench.last_output(exact).finish, answer_text(bench, exact)) == ("stop", "yes")


def test_a_users_stop_token_ends_a_constrained_answer_too() -> None:
    bench = Bench()
    (number,) = add_compiled(
        bench, grammar=ChoiceGrammar(choices=["yes"]), stop_token_ids=ids_of("e")
    )
    bench.run()
    end = bench.last_output(number)
    assert (end.finish, end.stop_token, answer_text(bench, number)) == (
        "stop",
        ids_of("e")[0],
        "ye",
    )


def test_an_answer_keeps_its_place_in_the_grammar_through_preemption() -> None:
    crowded = Bench(num_blocks=9, block_tokens=4, max_slots=4, prefix_cache=False)
    roomy = Bench()
    prompts = [[n, n, n] for n in range(1, 5)]
    answers = []
    for bench in (crowded, roomy):
        numbers = add_compiled(bench, *prompts, grammar=Regex(pattern="([ab]c){6}d"))
        bench.run()
        answers.append([answer_text(bench, number) for number in numbers])
    assert crowded.engine.stats().num_preemptions > 0
    assert answers[0] == answers[1]
    assert all(re.fullmatch("([ab]c){6}d", answer) for answer in answers[0])


def test_a_grammar_found_too_large_within_the_answer_is_an_invalid_request() -> None:
    """The schema allows any key, so the probe's short walks miss the key that leads to the large
    part."""
    large = {"type": "object", "properties": {f"n{i}": {"type": "string"} for i in range(2000)}}
    body = {"type": "object", "properties": {"far": large}}
    text = ids_of('{"far":{"')
    bench = Bench()
    (number,) = add_compiled(bench, grammar=JsonSchema(text=json.dumps(body)), max_tokens=100)
    for token in text:
        plan = bench.plan()
        assert plan is not None
        result = bench.worker.execute(plan, bench.masks)
        bench.worker.tokens[0][-1] = token
        steered = StepResult(step=result.step, tokens=Int32.of([token]), failed=result.failed)
        bench.commit(steered)
        if bench.last_output(number).finish is not None:
            break
    end = bench.last_output(number)
    assert (end.finish, end.tokens) == ("error", [])
    assert (end.error.code, end.error.param) == ("invalid_request", "grammar")
    assert "could not be enforced" in end.error.message
    assert "max is" in end.error.message


def test_a_token_outside_the_grammar_ends_only_its_own_request() -> None:
    bench = Bench()
    bad, good = add_compiled(bench, [1], [2])
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan, bench.masks)
    wrong = ids_of("z")[0]
    tampered = StepResult(
        step=result.step, tokens=Int32.of([wrong, result.tokens.tolist()[1]]), failed=result.failed
    )
    bench.worker.tokens[0][-1] = wrong
    bench.commit(tampered)
    end = bench.last_output(bad)
    assert end.finish == "error"
    assert (end.error.code, end.tokens) == ("step_failed", [])
    assert end.error.message.startswith("the grammar failed:")
    bench.run()
    assert re.fullmatch("[ab]{3,9}c", answer_text(bench, good))


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"allowed_token_ids": [9]}, "grammar, allowed_token_ids left none"),
        ({"bad_words": [[9]], "min_tokens": 1}, "grammar, bad_words, min_tokens left none"),
    ],
)
def test_a_row_without_possible_tokens_fails_alone_and_names_the_filters(
    params: dict[str, object], names: str
) -> None:
    bench = Bench()
    (number,) = add_compiled(bench, **params)
    (other,) = add_compiled(bench, [2, 3])
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan, bench.masks)
    failed = StepResult(step=result.step, tokens=result.tokens, failed=Int32.of([0]))
    bench.commit(failed)
    end = bench.last_output(number)
    assert end.finish == "error"
    assert end.error.message.startswith(f"no token was possible: {names}")
    assert bench.outputs[CLIENT, other][-1].finish is None


def test_a_grammar_that_failed_is_compiled_again_for_the_next_request(monkeypatch) -> None:
    bench = Bench()
    add_compiled(bench)
    monkeypatch.setattr(Matcher, "error", "lexer limit reached")
    bench.run()
    monkeypatch.undo()
    bench.add(PROMPT, grammar=WORD)
    assert len(bench.jobs) == 1


def test_thinking_is_part_of_the_grammar() -> None:
    bench = Bench()
    thinking = Thinking(opens="(", closes=")")
    numbers = add_compiled(
        bench,
        *([n] for n in range(1, 9)),
        grammar=Grammar(body=ChoiceGrammar(choices=["yes"]), thinking=thinking),
        max_tokens=190,
    )
    bench.run()
    complete = [answer_text(bench, n) for n in numbers if bench.last_output(n).finish == "stop"]
    assert complete
    for answer in complete:
        assert re.fullmatch(r"(\([^)]*\)[ \n]*)+yes", answer)


# ---- the cache
def a_cache(*sizes: int) -> tuple[GrammarCache, list[bytes]]:
    """Return a cache with compiled grammars of these sizes in bytes, and their digests."""
    cache, template = GrammarCache(), echo_compiler().compile(Grammar(body=WORD))
    digests = [cache.find(Grammar(body=Regex(pattern=f"a{n}")))[0] for n in range(len(sizes))]
    for digest, size in zip(digests, sizes, strict=True):
        cache.on_grammar_compiled(CompiledGrammar(digest, template, size))
        cache.shrink()
    return cache, digests


def test_unused_grammars_are_bounded_by_their_size() -> None:
    """Each takes a third of the limit, so the fourth one drops the least recently used."""
    third = MAX_KEPT_BYTES // 3
    cache, digests = a_cache(third, third, third)
    cache.find(Grammar(body=Regex(pattern="a0")))
    cache.on_grammar_compiled(CompiledGrammar(b"new", cache.cached[digests[0]].template, third))
    cache.shrink()
    assert [*cache.cached] == [digests[2], digests[0], b"new"]
    assert cache.num_dropped_bytes == third


def test_a_small_grammar_counts_with_a_least_size() -> None:
    count = MAX_KEPT_BYTES // MIN_TEMPLATE_BYTES
    cache, digests = a_cache(*[1] * (count + 5))
    assert [*cache.cached] == digests[5:]


def test_grammars_of_open_requests_are_kept_and_bounded() -> None:
    size = MAX_TEMPLATE_BYTES
    cache, digests = a_cache(size)
    template = cache.cached[digests[0]].template if digests[0] in cache.cached else None
    assert template is None, "one that is larger than the limit is not kept without a user"
    template = echo_compiler().compile(Grammar(body=WORD))
    for n in range(MAX_USED_BYTES // size):
        cache.on_grammar_compiled(CompiledGrammar(bytes([n]), template, size))
        cache.add_user(bytes([n]))
        cache.shrink()
    cache.on_grammar_compiled(CompiledGrammar(b"one more", template, size))
    with pytest.raises(Overloaded):
        cache.add_user(b"one more")
    cache.shrink()
    assert b"one more" not in cache.cached
    cache.add_user(b"\0")  # a further user of a grammar takes nothing more
    cache.remove_user(b"\0")
    cache.remove_user(b"\1")
    cache.on_grammar_compiled(CompiledGrammar(b"one more", template, size))
    cache.add_user(b"one more")


def test_a_request_counts_as_a_user_until_it_ends() -> None:
    bench = Bench()
    number, other = add_compiled(bench, [1], [2], max_tokens=4)
    (cached,) = bench.engine.admission.cached_grammars.values()
    assert cached.num_users == 2
    bench.abort(number)
    assert cached.num_users == 1
    bench.run()
    assert bench.last_output(other).finish
    assert cached.num_users == 0


def test_requests_are_refused_while_the_grammars_of_others_fill_the_memory() -> None:
    bench = Bench(max_waiting=100)
    sizes = dict.fromkeys(range(20), MAX_TEMPLATE_BYTES)
    numbers = [bench.add(PROMPT, grammar=Regex(pattern=f"a{{{n + 1}}}")) for n in sizes]
    replies: dict[int, Accepted | Refused] = {}
    for size in sizes.values():
        replies |= bench.compile(num_bytes=size)
    refused = [reply for reply in replies.values() if isinstance(reply, Refused)]
    assert {(each.error.code, each.error.retry_after_s) for each in refused} == {
        ("overloaded", RETRY_S)
    }
    assert len(numbers) - len(refused) == MAX_USED_BYTES // MAX_TEMPLATE_BYTES
    bench.run()
    cached = bench.engine.admission.cached_grammars.values()
    assert sum(each.num_bytes for each in cached) <= MAX_KEPT_BYTES


def test_only_equal_grammars_have_equal_digests() -> None:
    cache = GrammarCache()
    grammars = [
        Grammar(body=Regex(pattern="a")),
        Grammar(body=ChoiceGrammar(choices=["a"])),
        Grammar(body=Lark(text="a")),
        Grammar(body=Regex(pattern="a"), thinking=Thinking(opens="<", closes=">")),
    ]
    assert len({cache.find(grammar)[0] for grammar in grammars}) == 4
    assert cache.find(grammars[0])[0] == cache.find(Grammar(body=Regex(pattern="a")))[0]


def test_a_new_grammar_is_refused_while_too_many_are_being_compiled() -> None:
    bench = Bench(max_waiting=10_000)
    for n in range(MAX_PENDING):
        bench.add(PROMPT, grammar=Regex(pattern=f"a{{{n + 1}}}"))
    reply = bench.refusal(PROMPT, grammar=WORD)
    assert (reply.error.code, reply.error.retry_after_s) == ("overloaded", 5.0)
    bench.add(PROMPT, grammar=Regex(pattern="a{1}"))
    bench.compile()
    bench.add(PROMPT, grammar=WORD)


def test_an_account_with_few_grammars_is_accepted_while_another_floods() -> None:
    bench = Bench(max_waiting=10_000)
    alice, bob = Account(name="alice"), Account(name="bob")
    for n in range(MAX_PENDING):
        bench.add(PROMPT, grammar=Regex(pattern=f"a{{{n + 1}}}"), account=alice)
    assert bench.refusal(PROMPT, grammar=WORD, account=alice).error.code == "overloaded"
    bench.add(PROMPT, grammar=WORD, account=bob)
    assert [job.account for job in bench.jobs[-2:]] == ["alice", "bob"]


def test_waiting_grammars_are_bounded_by_their_length() -> None:
    bench = Bench(max_waiting=10_000)
    size = 512 << 10
    text = json.dumps({"type": "string", "description": "x" * (size - 200)})
    for n in range(MAX_PENDING_CHARS // size + 1):
        bench.add(PROMPT, grammar=JsonSchema(text=f'{text[:-1]}, "$comment": "{n}"}}'))
    assert bench.refusal(PROMPT, grammar=WORD).error.code == "overloaded"


def test_requests_of_two_accounts_wait_for_one_grammar_in_both_turns() -> None:
    bench = Bench()
    first = bench.add(PROMPT, grammar=WORD, account=Account(name="alice"))
    second = bench.add(PROMPT, grammar=WORD, account=Account(name="bob"))
    assert [(job.account, job.digest) for job in bench.jobs] == [
        ("alice", bench.jobs[0].digest),
        ("bob", bench.jobs[0].digest),
    ]
    assert bench.compile() == {n: Accepted(request=n) for n in (first, second)}
    assert bench.compile() == {}


def test_a_plan_in_flight_keeps_its_masks_after_an_abort() -> None:
    bench = Bench()
    first, second = add_compiled(bench, [1], [2])
    plan = bench.engine.plan()
    assert isinstance(plan, StepPlan)
    bench.adapters.check(plan)
    bench.worker.echo_images.apply((), plan)
    bench.in_flight.append(plan)
    bench.abort(first)
    bench.masks = bench.engine.masks()
    assert bench.masks.bits.shape == (2, 4)
    bench.finish()
    bench.run()
    assert bench.last_output(second).finish == "stop"
