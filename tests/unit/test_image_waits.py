"""How long requests wait for their images, and what the engine counts of them."""

from __future__ import annotations

import pytest

from tests.support.echo_images import PLACEHOLDER, image_of
from tests.support.engines import ECHO_ROW_BYTES
from tests.support.timelines import TimedBench

ROWS = 4
PROMPT = [1, 2, 3, *[PLACEHOLDER] * ROWS, 4]


def bench() -> TimedBench:
    found = TimedBench(image_rows=64, token_budget=64)
    found.tick(found.now)
    return found


def spans(bench: TimedBench, name: str) -> list[tuple[str, float]]:
    stages = bench.timeline(name).stages
    return [(span.stage, round(span.end_s - span.start_s, 3)) for span in stages]


def test_the_time_until_an_image_is_encoded_is_a_stage_of_its_own() -> None:
    engine = bench()
    image = image_of("a", (3, ROWS))
    engine.attach(image)
    number = engine.add(PROMPT, attachments=[image], max_tokens=2, labels=["mine"])
    engine.timed_step(0.25)  # the tokens before the image
    assert engine.plan() is None
    engine.pass_time(1.5)
    assert engine.encode_image()
    engine.timed_step(0.5)
    engine.timed_step(0.125)
    assert spans(engine, "mine") == [
        ("prefill", 0.25),
        ("encoding", 1.5),
        ("prefill", 0.5),
        ("decode", 0.125),
    ]
    times = engine.usage(number).times
    assert times is not None
    assert (times.encoding_s, times.prefill_s) == pytest.approx((1.5, 0.75))
    timeline = engine.timeline("mine")
    assert (timeline.images, timeline.image_tokens) == (1, ROWS)


def test_images_that_were_encoded_before_are_counted_as_hits() -> None:
    engine = bench()
    image = image_of("a", (3, ROWS))
    engine.attach(image)
    for name in ("first", "second"):
        prompt = [len(name), *PROMPT[1:]]  # the prefix cache finds nothing
        engine.add(prompt, attachments=[image], max_tokens=1, labels=[name])
        engine.run()
    stats = engine.engine.stats()
    assert (stats.num_images_encoded, stats.num_image_tokens_encoded) == (1, ROWS)
    assert (stats.num_image_hits, stats.image_encode_s) == (1, 0.5)
    assert (stats.image_tokens, stats.image_bytes) == (ROWS, ROWS * ECHO_ROW_BYTES)


def test_the_time_until_another_requests_image_is_encoded_is_no_wait() -> None:
    engine = bench()
    image = image_of("a", (3, ROWS))
    engine.attach(image)
    engine.add(PROMPT, attachments=[image], max_tokens=1, labels=["seeing"])
    engine.add([7, 8, 9], max_tokens=8, labels=["reading"])
    engine.timed_step()
    for _ in range(3):
        engine.timed_step()
    assert [stage for stage, _ in spans(engine, "reading")] == ["prefill", "decode"]
    assert spans(engine, "seeing")[-1] == ("encoding", 0.75)
