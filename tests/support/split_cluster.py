"""A gateway with several prefill and decode engines with a tiny model, all as processes."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import requests

from protocol.engine.stats import EngineStats
from protocol.wire.cluster_key import write_cluster_key
from protocol.wire.sockets import make_private
from tests.support.engine_view import EngineView
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import descendants_of, is_alive
from tests.support.tiny_side import START_S, TinySide
from tests.support.waiting import eventually

WORKER: dict[str, Any] = {"max_slots": 64, "kv_blocks": 2049}


class SplitEngine:
    """One of the engines. It may be killed, and started again at its address."""

    def __init__(self, folder: Path, checkpoint: Path, role: str, name: str, **config: Any) -> None:
        self._place = folder, checkpoint, role
        self._config = {"name": name, **config}
        self.start()

    def start(self) -> None:
        self.side = TinySide(*self._place, **self._config)
        self._pids: list[int] = []

    def stats(self) -> EngineStats:
        with EngineView(self.side.address) as view:
            return view.stats()

    def kill(self, *, only_worker: bool = False) -> None:
        """Kill the engine or its worker. Each ends if the other one has ended."""
        self._pids = [pid for pid, _ in descendants_of(self.side.process.pid)]
        pid = self.side.worker_pid if only_worker else self.side.process.pid
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Start the engine again after `kill`, when its processes have ended."""
        self.side.process.wait(START_S)
        self.end()
        assert eventually(lambda: not any(map(is_alive, self._pids)))
        self.start()

    def end(self) -> None:
        self.side.__exit__(None, None, None)


class SplitCluster:
    """The engines `p` and `d`, and their gateway. All are ready inside the `with` block.

    folder         folder of the sockets, which is made if it does not exist
    num_p, num_d   number of prefill and of decode engines
    dtype, engine  options of the engines
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *,
        num_p: int = 2,
        num_d: int = 2,
        dtype: str = "float32",
        **engine: Any,
    ) -> None:
        make_private(folder)
        write_cluster_key(str(folder / "key"))
        self._stack = ExitStack()
        self._key = str(folder / "key")

        def engines(role: str, count: int) -> list[SplitEngine]:
            config: dict[str, Any] = {"worker": {**WORKER, "dtype": dtype}, **engine}
            made = []
            for number in range(count):
                made.append(SplitEngine(folder, checkpoint, role, f"{role}{number}", **config))
                self._stack.callback(made[-1].end)
            return made

        self.p, self.d = engines("prefill", num_p), engines("decode", num_d)

    def __enter__(self) -> Self:
        with self._stack:
            self.gateway = self._stack.enter_context(
                GatewayProcess(
                    prefill=[engine.side.address for engine in self.p],
                    decode=[engine.side.address for engine in self.d],
                    cluster_key=self._key,
                    split_min_tokens=2,
                )
            )
            self.url = self.gateway.url
            self.gateway.await_ready()
            self.wait_until_ready()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def wait_until_ready(self) -> None:
        """Wait until the gateway uses all engines."""
        assert eventually(self._is_ready, within_s=START_S), self.gateway.log

    def _is_ready(self) -> bool:
        facts = requests.get(self.url + "/readyz", timeout=10).json()
        states = [*facts.get("prefill", []), *facts.get("decode", [])]
        return bool(states) and all(state["ready"] for state in states)
