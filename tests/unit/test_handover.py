"""A prompt computed by one engine, an answer given by another: every step of the hand-over."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.engines import Bench, answer
from tests.support.handover import Air

PROMPT = list(range(1, 31))  # 7 blocks of 4 without its last token, and 1 token in an eighth


@dataclass
class Pair:
    """P computes prompts, D answers; the test decides when K/V moves."""

    air: Air = field(default_factory=Air)
    options: dict[str, object] = field(default_factory=dict)
    p: Bench = field(init=False)
    d: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.p = self.bench("p", role="prefill")
        self.d = self.bench("d", role="decode", **self.options)

    def bench(self, name: str, **options: object) -> Bench:
        return Bench(place=self.air.place(name), **options)  # type: ignore[arg-type]

    def prefill(self, prompt: list[int] = PROMPT, readers: int = 1, **asked: object) -> str:
        number = self.p.add(prompt, kv_readers=readers, **asked)  # type: ignore[arg-type]
        assert isinstance(number, int), number
        self.p.run()
        return self.p.end(number).kv_handle

    def decode(self, handle: str, prompt: list[int] = PROMPT, **asked: object) -> int:
        number = self.d.add(prompt, kv_handle=handle, **asked)  # type: ignore[arg-type]
        assert isinstance(number, int), number
        self.d.plan()
        return number

    def move(self, fault: str = "") -> None:
        """The oldest fetch of D, and what both engines hear of it."""
        assert self.d.mover is not None
        assert self.p.mover is not None
        job = next(iter(self.d.mover.jobs))
        self.d.hear(self.d.mover.do(job, fault))
        self.p.hear(self.p.mover.report_taken())

    @property
    def jobs(self) -> int:
        assert self.d.mover is not None
        return len(self.d.mover.jobs)

    def assert_free(self) -> None:
        for bench in (self.p, self.d):
            stats = bench.engine.stats()
            assert stats.free_blocks == stats.total_blocks
            assert (stats.running, stats.fetching, stats.leases, stats.leased_blocks) == (0,) * 4
            assert bench.engine.is_idle


def test_a_prompt_is_computed_once_and_its_answer_is_that_of_one_engine() -> None:
    pair = Pair()
    handle = pair.prefill()
    assert pair.p.engine.stats().leases == 1
    number = pair.decode(handle, max_tokens=9)
    pair.move()
    pair.d.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    last = pair.d.end(number)
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.fetched_tokens) == (29, 29)
    computed = [bench.engine.stats().num_computed_tokens for bench in (pair.p, pair.d)]
    assert computed == [29, 9]  # of nine tokens of an answer the last one is not computed
    stats = pair.d.engine.stats()
    assert (stats.num_fetched_tokens, stats.num_fetched_bytes) == (29, 800)
    assert pair.p.engine.stats().num_leases_ended == {"taken": 1}
    pair.assert_free()
