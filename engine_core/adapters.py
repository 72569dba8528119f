"""The LoRA adapters of one engine: which are loaded, in which row of the worker's table.

A row is assigned when the loading starts, and is free again once the worker has reported that it
freed the memory. An adapter that is being unloaded gets no new requests, but its open ones finish
first. Its name is free at once, so another adapter may be loaded under it, in another row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine_core.requests.adapter import AdapterEvent, AdapterState, EngineAdapter
from engine_core.requests.request import Request
from protocol.engine.adapters import AdapterInfo, check_adapter_name, check_adapter_path
from protocol.engine.messages import AdapterChanged, LoadAdapter, Refused, UnloadAdapter
from protocol.wire.errors import InvalidRequest, StaleAdapter, UnknownModel, error_from
from protocol.worker.steps import AdapterLoad, AdapterReport, AdapterUnload

AdapterCommand = AdapterLoad | AdapterUnload
AdapterReply = AdapterChanged | Refused


class AdapterRegistry:
    """The adapters that own a row.

    num_rows   rows of the worker's table
    started    the adapters that the worker loaded at its start, in its first rows
    reserved   names that adapters cannot have
    can_load   whether adapters can be loaded while the engine runs
    """

    def __init__(
        self,
        num_rows: int,
        started: Sequence[AdapterInfo] = (),
        *,
        reserved: Collection[str] = (),
        can_load: bool = False,
    ) -> None:
        self._reserved = frozenset(reserved)
        self._can_load = can_load
        #: The names of the adapters that the worker loaded at its start, by row.
        self._started = [info.name for info in started]
        #: Row -> its generation, which increases each time an adapter gets the row.
        self._generations = [0] * num_rows
        self._adapters: list[EngineAdapter] = []
        #: Adapter -> the requests that use it and are open or still own a slot.
        self._users: dict[EngineAdapter, set[Request]] = {}
        #: Commands that `drain_commands` has not returned yet.
        self._commands: list[AdapterCommand] = []
        #: Whether the list of usable adapters has changed since clients were last sent it.
        self.has_changed = False
        for info in started:
            adapter = self._new(info.name, info.path)
            adapter.digest, adapter.rank = info.digest, info.rank
            adapter.move(AdapterEvent.LOADED)

    @property
    def infos(self) -> list[AdapterInfo]:
        """The adapters that requests can use now."""
        return [each.info for each in self._adapters if each.state is AdapterState.READY]

    @property
    def loaded_at_run_time(self) -> list[AdapterInfo]:
        """The adapters that requests can use now, except those that the worker loaded at its
        start."""
        return [
            each.info
            for each in self._adapters
            if each.state is AdapterState.READY and not self._is_started(each)
        ]

    @property
    def unloaded_at_run_time(self) -> list[str]:
        """The names of the adapters that the worker loaded at its start, and that requests cannot
        use any more."""
        kept = {
            each.row
            for each in self._adapters
            if each.state is AdapterState.READY and self._is_started(each)
        }
        return [name for row, name in enumerate(self._started) if row not in kept]

    @property
    def num_requests(self) -> dict[str, int]:
        """The number of requests that each usable adapter has had."""
        ready = (each for each in self._adapters if each.state is AdapterState.READY)
        return {adapter.name: adapter.num_requests for adapter in ready}

    @property
    def is_leaving(self) -> bool:
        """Whether an adapter waits for its last requests."""
        return any(each.state is AdapterState.LEAVING for each in self._adapters)

    @property
    def is_empty(self) -> bool:
        return not self._adapters

    def get(self, name: str, digest: str = "") -> EngineAdapter:
        """Return a usable adapter. Raises UnknownModel if there is none with this name, and
        StaleAdapter if it does not have this digest. "": any digest."""
        for adapter in self._adapters:
            if adapter.name == name and adapter.state is AdapterState.READY:
                if digest and adapter.digest != digest:
                    raise StaleAdapter(
                        f"the adapter {name!r:.200} was replaced in the meantime: try again",
                        retry_after_s=1,
                    )
                return adapter
        raise UnknownModel(f"there is no adapter {name!r:.200}", param="model")

    def load(self, client: bytes, message: LoadAdapter) -> None:
        """Start to load an adapter. `on_report` returns the reply. Raises InvalidRequest if that is
        not possible."""
        if not self._can_load:
            raise InvalidRequest(
                "this server loads no adapters while it runs; start it with --lora-dir DIRECTORY",
                param="lora_path",
            )
        check_adapter_name(message.name)
        check_adapter_path(message.path)
        if message.name in self._reserved:
            raise InvalidRequest.at("lora_name", f"{message.name!r} is the name of the model")
        for each in self._adapters:
            if each.name == message.name and each.state in (
                AdapterState.LOADING,
                AdapterState.READY,
            ):
                state = "is loaded" if each.state is AdapterState.READY else "is being loaded"
                raise InvalidRequest.at("lora_name", f"an adapter {message.name!r} {state} already")
        adapter = self._new(message.name, message.path)
        adapter.client, adapter.request = client, message.request
        self._commands.append(
            AdapterLoad(row=adapter.row, generation=adapter.generation, path=adapter.path)
        )

    def unload(self, client: bytes, message: UnloadAdapter) -> None:
        """Stop using an adapter for new requests. `on_report` returns the reply. Raises
        UnknownModel if there is no such adapter."""
        try:
            adapter = self.get(message.name)
        except UnknownModel as error:
            raise UnknownModel(error.message, param="lora_name") from None
        adapter.move(AdapterEvent.UNLOAD)
        adapter.client, adapter.request = client, message.request
        self.has_changed = True

    def add_user(self, request: Request) -> None:
        """Record that an open request uses its adapter, if it has one. Adding it again changes
        nothing."""
        if request.adapter is not None:
            self._users.setdefault(request.adapter, set()).add(request)

    def remove_user(self, request: Request) -> None:
        """Record that a request has ended and owns no slot."""
        if request.adapter is not None:
            users = self._users.get(request.adapter, set())
            users.discard(request)
            if not users:
                self._users.pop(request.adapter, None)

    def drain_commands(self) -> list[AdapterCommand]:
        """Return the commands for the worker since the last call. They include the unloading of
        adapters that are to leave and that no request uses any more. The loop calls this on each
        turn, so it must take only O(adapters)."""
        for adapter in self._adapters:
            if adapter.state is AdapterState.LEAVING and adapter not in self._users:
                adapter.move(AdapterEvent.UNUSED)
                self._commands.append(AdapterUnload(row=adapter.row, generation=adapter.generation))
        commands, self._commands = self._commands, []
        return commands

    def on_report(self, report: AdapterReport) -> tuple[bytes, AdapterReply]:
        """Apply the worker's report. Return the client that waits for it, and the reply. Raises
        RuntimeError if no adapter has this row and generation."""
        adapter = self._at(report.row, report.generation)
        reply: AdapterReply
        if adapter.state is AdapterState.UNLOADING:
            adapter.move(AdapterEvent.FREED)
            reply = AdapterChanged(request=adapter.request, adapter=adapter.info)
        elif report.error is not None:
            adapter.move(AdapterEvent.FAILED)
            reply = Refused(request=adapter.request, error=error_from(report.error).info())
        else:
            adapter.digest, adapter.rank = report.digest, report.rank
            adapter.move(AdapterEvent.LOADED)
            self.has_changed = True
            reply = AdapterChanged(request=adapter.request, adapter=adapter.info)
        if adapter.state is AdapterState.GONE:
            self._adapters.remove(adapter)
        return adapter.client, reply

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if a request that is open or owns a slot uses an adapter that may
        not be used, if the users of an adapter are not exactly these requests, or if two adapters
        own one row. For tests and replays."""
        rows = [adapter.row for adapter in self._adapters]
        assert len(set(rows)) == len(rows), "two adapters own one row"
        usable = (AdapterState.READY, AdapterState.LEAVING)
        users: dict[EngineAdapter, set[Request]] = {}
        for request in requests:
            if request.adapter is not None:
                users.setdefault(request.adapter, set()).add(request)
        for adapter in users:
            assert adapter in self._adapters, "a request's adapter owns no row"
            assert adapter.state in usable, "a request uses an adapter that is not loaded"
        assert self._users == users, "wrong users of an adapter"

    def _is_started(self, adapter: EngineAdapter) -> bool:
        """Return whether the worker loaded the adapter at its start. These are the first owners of
        the first rows."""
        return adapter.row < len(self._started) and adapter.generation == 1

    def _at(self, row: int, generation: int) -> EngineAdapter:
        for adapter in self._adapters:
            if (adapter.row, adapter.generation) == (row, generation):
                return adapter
        raise RuntimeError(f"the worker reported on adapter row {row}, generation {generation}")

    def _new(self, name: str, path: str) -> EngineAdapter:
        """Return a new adapter in a free row. Raises InvalidRequest if there is none."""
        taken = {adapter.row for adapter in self._adapters}
        free = [row for row in range(len(self._generations)) if row not in taken]
        if not free:
            raise InvalidRequest.at(
                "lora_name",
                f"{len(taken)} adapters are loaded, the limit of --max-loras; unload one first",
            )
        row = free[0]
        self._generations[row] += 1
        adapter = EngineAdapter(name, path, row, self._generations[row])
        self._adapters.append(adapter)
        return adapter
