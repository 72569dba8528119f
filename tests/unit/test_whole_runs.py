"""Runs that are computed as a whole (engine_core/requests/whole_runs.py): steps, the prefix cache,
handoffs, and what is refused. The echo worker checks that no step cuts a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_core.admission.check_generate import new_request
from engine_core.requests.stage_timer import EngineClock
from engine_core.requests.whole_runs import last_end, least_end, whole_runs_of
from protocol.engine.attachments import Attachment
from protocol.engine.kv_window import KVGroups
from protocol.engine.messages import Account, Generate
from protocol.wire.arrays import Int32
from tests.support.echo_images import PLACEHOLDER, echo_images_card, image_of, with_rows
from tests.support.engines import CLIENT, Bench, a_card, next_token


def bench(**options: Any) -> Bench:
    return Bench(**({"image_rows": 400, "image_data_mib": 64, "sees_whole_runs": True} | options))


def prompt_of(length: int, *runs: tuple[int, int]) -> list[int]:
    shown = {at for first, count in runs for at in range(first, first + count)}
    return [PLACEHOLDER if at in shown else at % 90 for at in range(length)]


def ask(
    engine: Bench, length: int, *runs: tuple[int, int], max_tokens: int = 4, **more: Any
) -> tuple[int, list[int]]:
    """Add a request with one image. Return its number, and the answer that it must get."""
    image, prompt = image_of("a", *runs), prompt_of(length, *runs)
    engine.attach(image)
    number = engine.add(prompt, attachments=[image], max_tokens=max_tokens, **more)
    seen = with_rows(prompt, [image])
    for _ in range(max_tokens):
        seen.append(next_token(seen, 0))
    return number, seen[length:]


def test_a_chunk_ends_before_or_after_a_run() -> None:
    runs = whole_runs_of([image_of("a", (4, 6)), image_of("b", (12, 2), (20, 1))])
    assert runs == ((4, 10), (12, 14))
    assert [last_end(runs, at) for at in (3, 4, 5, 9, 10, 13, 21)] == [3, 4, 4, 4, 10, 12, 21]
    assert [least_end(runs, at) for at in (3, 4, 10, 12, 14, 20)] == [4, 10, 11, 14, 15, 21]


def test_a_run_waits_for_a_step_with_room() -> None:
    engine = bench(token_budget=16, max_slots=4)
    first, _ = ask(engine, 40, (30, 9))
    engine.run()
    assert [plan.row_tokens.tolist() for plan in engine.plans[:3]] == [[16], [14], [10]]
    assert len(engine.tokens(first)) == 4


def test_a_run_is_computed_beside_the_decodes_of_another_account() -> None:
    """It is longer than the budget for prompts while accounts share the engine."""
    engine = bench(token_budget=128, max_slots=8)
    assert engine.engine.scheduler.fair_share.shared_prefill_budget < 100
    engine.add([1, 2, 3], max_tokens=50, account=Account(name="alice"))
    engine.step()
    number, answer = ask(engine, 110, (4, 100), account=Account(name="bob"))
    engine.run()
    assert engine.tokens(number) == answer


def test_a_cached_prefix_ends_before_or_after_a_run() -> None:
    engine = bench(block_tokens=4)
    for length, num_cached in ((20, 0), (20, 16), (17, 16), (16, 4), (13, 4)):
        number, answer = ask(engine, length, (6, 7))
        engine.run()
        assert engine.tokens(number) == answer
        assert engine.usage(number).cached_tokens == num_cached


def test_a_run_of_another_length_shares_no_block_with_equal_rows() -> None:
    """The K/V of its first rows depends on its last ones, which are in later blocks."""
    engine = bench(block_tokens=4)
    for runs in [((2, 10),), ((2, 6), (9, 4))]:
        number, answer = ask(engine, 20, *runs)
        engine.run()
        assert engine.tokens(number) == answer
        assert engine.usage(number).cached_tokens == 0


def test_an_image_that_no_step_can_hold_is_refused() -> None:
    engine = bench(token_budget=16, max_slots=4)
    image = image_of("a", (1, 14))
    engine.attach(image)
    refused = engine.refusal(prompt_of(20, (1, 14)), attachments=[image])
    assert refused.error.param == "attachments[0]"
    assert "14 tokens are computed in one step, and exceed the 13 of one" in refused.error.message
    assert "--token-budget" in refused.error.message
    image = image_of("a", (1, 13))
    engine.attach(image)
    engine.add(prompt_of(20, (1, 13)), attachments=[image])


def test_an_image_that_the_cache_cannot_hold_is_refused() -> None:
    engine = bench(kv_groups=KVGroups(window=4, window_blocks=4), num_blocks=50)
    image = image_of("a", (1, 50))
    engine.attach(image)
    prompt = prompt_of(60, (1, 50))
    refused = engine.refusal(prompt, attachments=[image], max_tokens=4)
    assert "needs 72 blocks of the 49 in the K/V cache" in refused.error.message


@pytest.mark.parametrize(
    ("runs", "computed", "readers"), [([(3, 5)], 3, 1), ([(3, 4)], 7, 1), ([(0, 8)], 8, 0)]
)
def test_a_prompt_is_handed_over_without_a_part_of_a_run(
    runs: list[tuple[int, int]], computed: int, readers: int
) -> None:
    """The last token is computed by the reader, and so is the whole run that it ends."""
    prompt, images = prompt_of(8, *runs), [image_of("a", *runs)]
    request = asked(prompt, images, kv_readers=1)
    assert len(request.tokens) == computed
    assert request.kv_readers == readers
    assert all(end <= computed for _, end in request.whole_runs)


def asked(prompt: list[int], images: list[Attachment], **more: Any) -> Any:
    message = Generate(request=1, prompt=Int32.of(prompt), attachments=images, **more)
    card = msgspec.structs.replace(a_card(), images=echo_images_card(sees_whole_runs=True))
    limits = bench().limits
    return new_request(CLIENT, message, prompt, 1, lambda: 0, card, limits, EngineClock())
