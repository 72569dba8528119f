"""Two engines with echo workers, one of which computes prompts for the other; the test decides when
K/V moves."""

from __future__ import annotations

from typing import Any

from tests.support.engines import Bench
from tests.support.handover import EchoMover, KVNetwork

PROMPT = list(range(1, 31))
"""Without its last token 7 blocks of 4, and 1 token in an eighth."""


class HandoffPair:
    def __init__(self, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> None:
        """p, d: options of the two benches."""
        self.air = KVNetwork()
        self.p = Bench(place=self.air.member("p"), **{"role": "prefill", **(p or {})})
        self.d = Bench(place=self.air.member("d"), **{"role": "decode", **(d or {})})

    @property
    def movers(self) -> tuple[EchoMover, EchoMover]:
        """P's and D's."""
        assert self.p.mover is not None
        assert self.d.mover is not None
        return self.p.mover, self.d.mover

    def prefill(self, prompt: list[int] = PROMPT, readers: int = 1, **asked: Any) -> str:
        """P computes it: the handle."""
        number = self.p.add(prompt, kv_readers=readers, **asked)
        self.p.run()
        return self.p.last_output(number).kv_handle

    def decode(self, handle: str, prompt: list[int] = PROMPT, **asked: Any) -> int:
        """D takes a request, and whatever it can do before K/V has moved."""
        number = self.d.add(prompt, kv_handle=handle, **asked)
        self.d.plan()
        return number

    def move(self, fault: str = "") -> None:
        """The oldest fetch of D, and what both engines hear of it."""
        p, d = self.movers
        report = d.carry_out(next(iter(d.jobs)), fault)
        self.d.on_kv_report(report)
        self.p.on_kv_report(p.report_taken())

    def run(self) -> None:
        """Both, until nothing is left to do but to wait."""
        while self.p.step() is not None or self.d.step() is not None or self.movers[1].jobs:
            if self.movers[1].jobs:
                self.move()

    def is_free(self) -> bool:
        """Nobody holds anything, on either side."""
        told = [bench.engine.stats() for bench in (self.p, self.d)]
        return all(
            bench.engine.is_idle
            and stats.free_blocks == stats.total_blocks
            and (stats.running, stats.fetching, stats.leases, stats.leased_blocks) == (0,) * 4
            for bench, stats in zip((self.p, self.d), told, strict=True)
        )
