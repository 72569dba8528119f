"""A prefill engine P and a decode engine D with echo workers. The test decides when K/V moves."""

from __future__ import annotations

from typing import Any

from tests.support.engines import Bench
from tests.support.handover import EchoMover, KVNetwork

PROMPT = list(range(1, 31))
"""30 tokens. The first 29 fill 7 blocks of 4 and one position of another block."""


class HandoffPair:
    def __init__(self, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> None:
        """Create both benches, with the options `p` and `d`."""
        self.air = KVNetwork()
        self.p = Bench(place=self.air.member("p"), **{"role": "prefill", **(p or {})})
        self.d = Bench(place=self.air.member("d"), **{"role": "decode", **(d or {})})

    @property
    def movers(self) -> tuple[EchoMover, EchoMover]:
        """Return the movers of P and of D."""
        assert self.p.mover is not None
        assert self.d.mover is not None
        return self.p.mover, self.d.mover

    def prefill(self, prompt: list[int] = PROMPT, readers: int = 1, **asked: Any) -> str:
        """Let P compute a prompt, and return its handle."""
        number = self.p.add(prompt, kv_readers=readers, **asked)
        self.p.run()
        return self.p.last_output(number).kv_handle

    def decode(self, handle: str, prompt: list[int] = PROMPT, **asked: Any) -> int:
        """Send D a request, and let it plan what it can before K/V has moved. Return its number."""
        number = self.d.add(prompt, kv_handle=handle, **asked)
        self.d.plan()
        return number

    def move(self, fault: str = "") -> None:
        """Carry out D's oldest fetch, and send the reports to both engines."""
        p, d = self.movers
        report = d.carry_out(next(iter(d.jobs)), fault)
        self.d.on_kv_report(report)
        self.p.on_kv_report(p.report_taken())

    def run(self) -> None:
        """Run both engines and all fetches until nothing is left to do."""
        while self.p.step() is not None or self.d.step() is not None or self.movers[1].jobs:
            if self.movers[1].jobs:
                self.move()

    def is_free(self) -> bool:
        """Return whether neither engine holds a request, a lease or a block."""
        found = [bench.engine.stats() for bench in (self.p, self.d)]
        return all(
            bench.engine.is_idle
            and stats.free_blocks == stats.total_blocks
            and (stats.running, stats.fetching, stats.leases, stats.leased_blocks) == (0,) * 4
            for bench, stats in zip((self.p, self.d), found, strict=True)
        )
