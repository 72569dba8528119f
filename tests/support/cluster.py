"""A prefill engine, a decode engine and a gateway, as processes with the real model. They are
connected by TCP, as on different hosts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from protocol.wire.cluster_key import read_cluster_key, write_cluster_key
from tests.support.engine_view import EngineView
from tests.support.model import smollm2_gguf
from tests.support.ports import free_port
from tests.support.processes import Program, descendants_of
from tests.support.server import POISON, START_TIMEOUT_S


class EngineAlone(Program):
    """A `tidegate engine` process. Call `await_ready` before use."""

    def __init__(self, role: str, key: str, address: str, *options: str) -> None:
        self.address = address
        self.key = key
        where = ["--role", role, "--address", address, "--cluster-key", key]
        if role == "prefill":
            where += ["--kv-address", f"tcp://127.0.0.1:{free_port()}"]
        arguments = ["-P", "-m", "tools", "engine", str(smollm2_gguf()), *where, *POISON, *options]
        super().__init__(arguments)

    def await_ready(self) -> Self:
        self.line_with("This engine serves", timeout_s=START_TIMEOUT_S)
        return self

    def view(self) -> EngineView:
        return EngineView(self.address, read_cluster_key(self.key))

    @property
    def engine_pid(self) -> int:
        found = descendants_of(self.process.pid)
        (pid,) = [pid for pid, words in found if "-m engine_core" in words]
        return pid


class Cluster:
    """The three processes, ready inside `with Cluster(folder, *engine_options) as cluster`.

    url   HTTP address of the gateway
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = str(folder / "cluster.key")
        self._options = options
        self._stack = ExitStack()
        write_cluster_key(self.key)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            self.p = stack.enter_context(self.engine("prefill", addresses[0]))
            self.d = stack.enter_context(self.engine("decode", addresses[1]))
            serve = ["-P", "-m", "tools", "serve", "--port", str(self.port)]
            where = ["--prefill", addresses[0], "--decode", addresses[1], "--cluster-key", self.key]
            options = ["--split-min-tokens", "2", "--failover-s", "1"]
            gateway = Program([*serve, *where, *options])
            self.gateway = stack.enter_context(gateway)
            self.p.await_ready()
            self.d.await_ready()
            self.gateway.line_with("Tidegate serves", timeout_s=START_TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def engine(self, role: str, address: str) -> EngineAlone:
        return EngineAlone(role, self.key, address, *self._options)
