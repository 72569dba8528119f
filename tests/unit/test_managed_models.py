"""The models that clients download, copy and delete, without sockets, processes and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from protocol.config.engine import EngineConfig
from protocol.config.gateway import ModelConfig
from protocol.config.worker import WorkerConfig
from protocol.tools.control import (
    ControlError,
    CopyModel,
    DeleteModel,
    FromSupervisor,
    GetLibrary,
    ModelLibrary,
    ModelStates,
    PullEnded,
    PullModel,
    PullProgress,
    ReportUse,
    StartModel,
    ToSupervisor,
)
from protocol.wire.errors import DiskFull
from tools.processes.actions import (
    Action,
    AddProcess,
    ProcessExit,
    RemoveProcess,
    SaveModels,
    SendReply,
    SendSignal,
    StartJob,
    StartProcess,
    StopJob,
)
from tools.processes.children import Command
from tools.processes.control_service import NOT_MANAGED, ControlService
from tools.processes.fleet import Fleet, FleetLimits
from tools.processes.managed_models import (
    MAX_DOWNLOADS,
    MAX_NAMES,
    MAX_PULLING,
    MAX_WAITING,
    ManagedModels,
)
from tools.processes.model_job import (
    JobFailed,
    JobProgress,
    JobReport,
    Order,
    Pulled,
    PullOrder,
    Removed,
    RemoveOrder,
)
from tools.processes.new_models import NewModels
from tools.processes.saved_models import ManagedModel, SavedModel
from tools.processes.supervisor import Supervisor

GATEWAY, OTHER_GATEWAY, CLIENT, SECOND = 1, 2, 3, 4
OWN, PULLED = "own", "tide/tiny"
OWN_PATHS = ["/models/own", "/drafts/small"]


class ManagedBench:
    """A server with one model of its operator, a gateway, and jobs that a test ends.

    added   models that clients added before this start
    """

    def __init__(self, *added: ManagedModel) -> None:
        groups = {"engine own": OWN, **{each.child: each.key for each in added}}
        self.supervisor = Supervisor(
            ["gateway", *groups],
            0.0,
            start_timeout_s=60.0,
            drain_s=30.0,
            groups=groups,
            optional=list(groups.values()),
            unloaded=[each.child for each in added],
        )
        planned = dict.fromkeys(groups.values(), 1 << 20)
        self.fleet = Fleet(planned, FleetLimits(memory_bytes=1 << 30), 0.0, loaded=[OWN])
        own = ManagedModel(
            ModelConfig(served_name=[OWN], engine="ipc://own"),
            "",
            OWN_PATHS,
            own_names=frozenset([OWN]),
            child="engine own",
        )
        new = NewModels(
            engine=EngineConfig(worker=WorkerConfig(model="", mmproj="/enc", lora=["a=/a"])),
            hosted=ModelConfig(),
            directory=Path("/run/tidegate"),
            command=lambda name, engine: Command(f"engine {name}", ["engine"], group=name),
            num_engines=1,
            disk_free=lambda: 1 << 40,
        )
        self.managed = ManagedModels(
            [own, *added], new, fleet=self.fleet, supervisor=self.supervisor, groups=groups
        )
        self.control = ControlService(
            self.supervisor, groups, fleet=self.fleet, managed=self.managed, timeout_s=60.0
        )
        self.now = 0.0
        self.replies: dict[int, list[FromSupervisor]] = {}
        self.orders: list[Order] = []
        self.saved: list[SavedModel] = []
        self.others: list[Action] = []
        self.perform(self.supervisor.on_ready())
        self.report()

    def perform(self, actions: Sequence[Action]) -> None:
        for action in [*actions, *self.control.advance(self.now)]:
            match action:
                case SendReply(connection, message):
                    self.replies.setdefault(connection, []).append(message)
                case StartJob(order):
                    self.orders.append(msgspec.json.decode(order, type=Order))
                case SaveModels(content):
                    self.saved = msgspec.json.decode(content, type=list[SavedModel])
                case _:
                    self.others.append(action)

    def send(self, request: ToSupervisor, connection: int = CLIENT) -> list[FromSupervisor]:
        """Send a request, and return the replies so far that the connection has not read yet."""
        self.perform(self.control.on_request(connection, request, self.now))
        return self.read(connection)

    def read(self, connection: int = CLIENT) -> list[FromSupervisor]:
        return self.replies.pop(connection, [])

    def report(self, connection: int = GATEWAY, **open: int) -> None:
        """Let a gateway confirm the current version."""
        report = ReportUse(
            open={PULLED: open["pulled"]} if open else {}, version=self.fleet.version
        )
        self.send(report, connection)
        self.read(connection)

    def end_job(self, result: JobReport | None) -> None:
        self.perform(self.control.on_job_ended(result))

    def finish_pull(self) -> Pulled:
        order = self.orders[-1]
        assert isinstance(order, PullOrder)
        worker = msgspec.structs.replace(order.engine.worker, model=f"/cache/{order.model}")
        engine = msgspec.structs.replace(order.engine, worker=worker)
        result = Pulled(engine=engine, hosted=order.hosted, planned_bytes=1 << 20)
        self.end_job(result)
        return result

    def pull(self, name: str = PULLED) -> None:
        """Download a model in full."""
        self.send(PullModel(model=name), SECOND)
        self.finish_pull()
        self.report()
        assert self.read(SECOND)[-1] == PullEnded(model=name)

    @property
    def names(self) -> list[list[str]]:
        return [each.served_name for each in self.managed.hosted]


@pytest.fixture
def bench() -> ManagedBench:
    return ManagedBench()


def refusal(replies: Sequence[FromSupervisor]) -> tuple[str, str]:
    (reply,) = replies
    assert isinstance(reply, ControlError)
    return reply.code, reply.message


def test_success_is_reported_after_every_gateway_has_confirmed_the_new_list(
    bench: ManagedBench,
) -> None:
    bench.report(OTHER_GATEWAY)
    started = PullProgress(model=PULLED, status="pulling manifest")
    assert bench.send(PullModel(model=PULLED)) == [started]
    bench.perform(
        bench.control.on_job_report(JobProgress(status="pulling 8e", digest="sha256:8e", total=2))
    )
    (progress,) = bench.read()
    assert isinstance(progress, PullProgress)
    assert (progress.model, progress.digest, progress.total) == (PULLED, "sha256:8e", 2)
    bench.finish_pull()
    for gateway in (GATEWAY, OTHER_GATEWAY):
        assert bench.read() == []
        (states,) = [each for each in bench.read(gateway) if isinstance(each, ModelStates)]
        assert states.hosted is not None
        assert [each.served_name for each in states.hosted] == [[OWN], [PULLED]]
        bench.report(gateway)
    success = PullProgress(model=PULLED, status="success")
    assert bench.read() == [success, PullEnded(model=PULLED)]
    assert bench.saved == [SavedModel(names=[PULLED], source=PULLED)]


def test_a_pulled_model_is_loaded_at_its_first_request(bench: ManagedBench) -> None:
    bench.pull()
    (added,) = [each for each in bench.others if isinstance(each, AddProcess)]
    assert StartProcess(added.command.name) not in bench.others
    bench.send(StartModel(model=PULLED), GATEWAY)
    assert StartProcess(added.command.name) in bench.others


def test_requests_for_one_model_follow_one_download_whatever_they_call_it(
    bench: ManagedBench,
) -> None:
    bench.send(PullModel(model=PULLED))
    (progress,) = bench.send(PullModel(model=f"hf.co/{PULLED}"), SECOND)
    assert isinstance(progress, PullProgress)
    assert progress.model == f"hf.co/{PULLED}"
    bench.finish_pull()
    bench.report()
    assert len(bench.orders) == 1
    assert bench.read(CLIENT)[-1] == PullEnded(model=PULLED)
    assert bench.read(SECOND)[-1] == PullEnded(model=f"hf.co/{PULLED}")
    assert bench.names == [[OWN], [PULLED, f"hf.co/{PULLED}"]]


def test_downloads_take_turns_and_have_engines_of_their_own(bench: ManagedBench) -> None:
    bench.send(PullModel(model=PULLED))
    (waiting,) = bench.send(PullModel(model="tide/other"), SECOND)
    assert isinstance(waiting, PullProgress)
    assert waiting.status == "waiting for another download"
    assert len(bench.orders) == 1
    first = bench.finish_pull()
    second = bench.finish_pull()
    assert [order.model for order in bench.orders] == [PULLED, "tide/other"]
    addresses = {"ipc://own", first.engine.address, second.engine.address}
    assert len(addresses) == 3
    assert (first.engine.worker.mmproj, first.engine.worker.lora) == ("", []), "of another model"


def test_a_download_continues_without_followers(bench: ManagedBench) -> None:
    bench.send(PullModel(model=PULLED))
    bench.perform(bench.control.on_closed(CLIENT, bench.now))
    assert StopJob() not in bench.others
    bench.finish_pull()
    assert bench.names == [[OWN], [PULLED]]
    assert bench.read() == []


def test_a_failed_download_is_reported_kept_and_can_be_tried_again(bench: ManagedBench) -> None:
    bench.send(PullModel(model=PULLED))
    bench.read()
    error = DiskFull("9 GB needed").info()
    bench.end_job(JobFailed(error=error))
    assert bench.read() == [PullEnded(model=PULLED, error=error)]
    (library,) = bench.send(GetLibrary())
    assert isinstance(library, ModelLibrary)
    entries = {each.name: each for each in library.models}
    assert (entries[PULLED].error, entries[PULLED].is_served) == ("9 GB needed", False)
    assert (entries[OWN].is_served, entries[OWN].is_deletable) == (True, False)
    bench.pull()
    (library,) = bench.send(GetLibrary())
    assert isinstance(library, ModelLibrary)
    assert {each.name: each.error for each in library.models}[PULLED] == ""


def test_a_job_that_is_killed_is_a_failed_download(bench: ManagedBench) -> None:
    bench.send(PullModel(model=PULLED))
    bench.end_job(JobProgress(status="pulling 8e"))
    ended = bench.read()[-1]
    assert isinstance(ended, PullEnded)
    assert ended.error is not None
    assert ended.error.code == "download_failed"


@pytest.mark.parametrize("is_running", [True, False])
def test_a_cancelled_download_leaves_no_model_and_only_partial_files_are_removed(
    is_running: bool, bench: ManagedBench
) -> None:
    if not is_running:
        bench.send(PullModel(model="tide/other"), OTHER_GATEWAY)
    bench.send(PullModel(model=PULLED), SECOND)
    bench.read(SECOND)
    bench.send(DeleteModel(model=PULLED))
    assert (StopJob() in bench.others) == is_running
    if is_running:
        bench.end_job(None)
    else:
        bench.finish_pull()
    bench.report()
    (ended,) = bench.read(SECOND)
    assert isinstance(ended, PullEnded)
    assert ended.error is not None
    assert bench.orders[-1] == RemoveOrder(model=PULLED, is_partial=True)
    assert all(PULLED not in names for names in bench.names)


def test_a_deleted_model_is_removed_after_its_requests_have_ended(bench: ManagedBench) -> None:
    bench.pull()
    bench.send(StartModel(model=PULLED), GATEWAY)
    bench.perform(bench.supervisor.on_ready())
    bench.report(pulled=1)
    assert bench.send(DeleteModel(model=PULLED)) == []
    assert bench.names == [[OWN]]
    code, message = refusal([bench.send(StartModel(model=PULLED), GATEWAY)[-1]])
    assert (code, message) == ("engine_not_ready", f"model {PULLED} is being deleted")
    bench.report(pulled=1)
    stops = [each for each in bench.others if isinstance(each, SendSignal)]
    assert stops == [], "a request is open"
    bench.report()
    (stop,) = [each for each in bench.others if isinstance(each, SendSignal)]
    assert not any(isinstance(order, RemoveOrder) for order in bench.orders), "its engine runs"
    bench.perform(bench.supervisor.on_exit(ProcessExit(stop.child, 0), bench.now))
    assert bench.orders[-1] == RemoveOrder(model=PULLED, in_use=OWN_PATHS)
    assert bench.read() == []
    bench.end_job(Removed(freed_bytes=5))
    bench.report()
    (states,) = bench.read()
    assert isinstance(states, ModelStates)
    assert [each.name for each in states.models] == [OWN]
    assert RemoveProcess(stop.child) in bench.others
    assert bench.saved == []


def test_the_files_of_models_that_were_pulled_meanwhile_are_in_use(bench: ManagedBench) -> None:
    bench.pull()
    bench.send(PullModel(model="tide/other"), SECOND)
    bench.send(DeleteModel(model=PULLED))
    bench.report()
    bench.finish_pull()
    assert bench.orders[-1] == RemoveOrder(model=PULLED, in_use=[*OWN_PATHS, "/cache/tide/other"])


def test_a_model_can_be_pulled_again_after_its_deletion_but_not_meanwhile(
    bench: ManagedBench,
) -> None:
    bench.pull()
    bench.send(DeleteModel(model=PULLED))
    assert "being deleted" in refusal(bench.send(PullModel(model=PULLED), SECOND))[1]
    bench.report()
    bench.end_job(Removed(freed_bytes=5))
    bench.report()
    bench.pull()
    engines = {order.engine.address for order in bench.orders if isinstance(order, PullOrder)}
    assert len(engines) == 2


def test_the_deletion_of_one_of_several_names_leaves_the_model_under_its_old_key(
    bench: ManagedBench,
) -> None:
    bench.pull()
    bench.send(CopyModel(source=PULLED, destination="small"))
    bench.report()
    bench.send(DeleteModel(model=PULLED))
    bench.report()
    assert bench.names == [[OWN], ["small"]]
    assert [each.supervised_name for each in bench.managed.hosted] == [OWN, PULLED]
    assert bench.saved == [SavedModel(names=["small"], source=PULLED)]
    assert not any(isinstance(order, RemoveOrder) for order in bench.orders)


def test_a_model_that_lost_a_name_after_a_restart_stays_beside_the_next_one_with_this_name() -> (
    None
):
    old = ManagedModel(
        ModelConfig(served_name=["tide/copy"], engine="ipc://old", load="first-use"),
        "tide/first",
        ["/cache/tide/first"],
        child="engine tide/copy",
    )
    bench = ManagedBench(old)
    bench.send(CopyModel(source="tide/copy", destination="kept"))
    bench.report()
    bench.send(DeleteModel(model="tide/copy"))
    bench.report()
    bench.pull("tide/copy")
    assert bench.names == [[OWN], ["kept"], ["tide/copy"]]
    keys = [each.supervised_name for each in bench.managed.hosted]
    assert len(set(keys)) == 3
    (added,) = [each.command for each in bench.others if isinstance(each, AddProcess)]
    assert (added.name == old.child, added.group) == (False, keys[-1])
    bench.send(DeleteModel(model="tide/copy"))
    bench.report()
    bench.end_job(Removed(freed_bytes=5))
    assert RemoveProcess(added.name) in bench.others
    assert bench.names == [[OWN], ["kept"]]
    bench.send(StartModel(model=keys[1]), GATEWAY)
    assert StartProcess(old.child) in bench.others


def test_a_name_of_the_operators_model_is_saved_for_that_model(bench: ManagedBench) -> None:
    bench.send(CopyModel(source=OWN, destination="gpt"))
    assert bench.saved == [SavedModel(names=["gpt"], model=OWN)]
    code, message = refusal(bench.send(DeleteModel(model=OWN)))
    assert code == "invalid_request"
    assert "only its operator" in message


def test_there_is_a_limit_of_downloads_and_of_names(bench: ManagedBench) -> None:
    for number in range(MAX_DOWNLOADS):
        bench.send(PullModel(model=f"tide/m{number}"), SECOND)
    assert refusal(bench.send(PullModel(model="tide/more")))[0] == "overloaded"
    for number in range(MAX_NAMES - MAX_DOWNLOADS - 1):
        bench.send(CopyModel(source=OWN, destination=f"n{number}"), SECOND)
        bench.report()
    assert len(bench.names[0]) == MAX_NAMES - MAX_DOWNLOADS
    code, message = refusal(bench.send(CopyModel(source=OWN, destination="more")))
    assert (code, message[:12]) == ("invalid_request", "destination:")
    code, message = refusal(bench.send(PullModel(model="hf.co/tide/m1")))
    assert (code, message[:6]) == ("invalid_request", "model:")
    (progress,) = bench.send(PullModel(model="tide/m1"))
    assert isinstance(progress, PullProgress)


def test_connections_are_left_to_gateways_whatever_clients_wait_for(bench: ManagedBench) -> None:
    bench.pull("tide/first")
    followers = range(100, 100 + MAX_PULLING - 1)
    for connection in followers:
        bench.send(PullModel(model=PULLED), connection)
    bench.send(DeleteModel(model="tide/first"))
    assert refusal(bench.send(PullModel(model=PULLED), SECOND))[0] == "overloaded"
    (*_, progress) = bench.send(PullModel(model=PULLED), followers[0])
    assert isinstance(progress, PullProgress), "this connection waits already"
    for number in range(MAX_PULLING, MAX_WAITING):
        assert bench.send(CopyModel(source=OWN, destination=f"n{number}"), 1000 + number) == []
    refused = (CopyModel(source=OWN, destination="more"), DeleteModel(model=PULLED))
    for request in refused:
        assert refusal(bench.send(request, SECOND))[0] == "overloaded"
    (library,) = bench.send(GetLibrary(), SECOND)
    assert isinstance(library, ModelLibrary)
    bench.report()
    bench.send(DeleteModel(model=PULLED), SECOND)
    assert StopJob() in bench.others


def test_a_server_that_clients_do_not_manage_refuses_these_requests() -> None:
    supervisor = Supervisor(["gateway"], 0.0, start_timeout_s=60.0, drain_s=30.0)
    control = ControlService(supervisor, {}, fleet=Fleet({}, FleetLimits(), 0.0), timeout_s=60.0)
    for request in (PullModel(model=PULLED), DeleteModel(model=PULLED), GetLibrary()):
        (action,) = control.on_request(CLIENT, request, 0.0)
        assert action == SendReply(CLIENT, ControlError(message=NOT_MANAGED))
