"""The models that clients download, copy and delete while a server runs.

The requests arrive on the control socket, from the gateways. This module decides what happens, and
has no socket, process or file itself. Its rules:

- A model is downloaded by one process at a time, and others wait for their turn, so that the check
  of the disk's free space holds for each. Requests for the same model follow its download.
- A download continues if nobody follows it. It ends early only if the model is deleted.
- A deleted model loses its names at once, so no gateway accepts a request for it. It is unloaded
  after its open requests have finished, and then its files are removed.
- Clients cannot delete the names that the operator gave on the command line, nor their models.
- A reply is sent after every gateway has confirmed the change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.config.gateway import ModelConfig
from protocol.tools.control import (
    ControlError,
    CopyModel,
    DeleteModel,
    DownloadableModel,
    FromSupervisor,
    GetLibrary,
    ModelLibrary,
    ModelStates,
    PullEnded,
    PullModel,
    PullProgress,
)
from protocol.wire.errors import (
    DownloadFailed,
    EngineNotReady,
    ErrorInfo,
    InvalidRequest,
    Overloaded,
    ServingError,
    UnknownModel,
)
from tools.models.catalogue import CATALOGUE, HUB_MODELS, catalogue_entries
from tools.processes.actions import (
    Action,
    AddProcess,
    LogAction,
    RemoveProcess,
    SaveModels,
    SendReply,
    StartJob,
    StopJob,
)
from tools.processes.control_server import MAX_CONNECTIONS
from tools.processes.fleet import Fleet
from tools.processes.model_job import (
    JobFailed,
    JobProgress,
    JobReport,
    Pulled,
    RemoveOrder,
)
from tools.processes.model_phases import NOT_LOADED
from tools.processes.new_models import NewModels
from tools.processes.saved_models import ManagedModel, SavedModel, loaded_paths, source_of
from tools.processes.supervisor import Supervisor

MAX_DOWNLOADS = 16
"""Most downloads that run or wait."""
MAX_MODELS = 64
"""Most models of a server. Each has metrics of its own."""
MAX_NAMES = 256
"""Most names of all models together. Every change of a model's state is sent with them."""
MAX_PULLING, MAX_WAITING = MAX_CONNECTIONS // 2, MAX_CONNECTIONS * 3 // 4
"""Most connections that wait for a reply if one more pulls a model, or requests another change,
such as the end of a download. The rest is left to gateways and commands."""
MAX_FAILURES = 16
"""Most failed downloads whose causes are kept."""
LEFTOVERS = "leftovers"
"""The running job if it removes the partial files of a download."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:@+-]{0,199})")

ManageRequest = PullModel | CopyModel | DeleteModel | GetLibrary


@dataclass(slots=True, eq=False)
class ModelDownload:
    """A download that runs or waits."""

    source: str
    #: The names that clients used for it, each of which the model gets.
    names: list[str]
    latest: PullProgress
    #: Connections that receive its progress -> the name that they used.
    followers: dict[int, str] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class PendingReply:
    """Messages that are sent after every gateway has confirmed a version of the states."""

    connection: int
    version: int
    #: None among them: the states of all models.
    messages: Sequence[FromSupervisor | None]


class ManagedModels:
    """The models of a server whose clients manage them.

    models   those of the command line, and those that clients added before this start
    groups   child -> model of its engine. It is changed when models are added and removed
    """

    def __init__(
        self,
        models: Sequence[ManagedModel],
        new: NewModels,
        *,
        fleet: Fleet,
        supervisor: Supervisor,
        groups: dict[str, str],
    ) -> None:
        self._models = {each.key: each for each in models}
        self._new = new
        self._fleet, self._supervisor, self._groups = fleet, supervisor, groups
        self._downloads: dict[str, ModelDownload] = {}  # by source, in the order of their turns
        self._failures: dict[str, str] = {}  # name -> why its last download failed
        self._orders: list[tuple[str, RemoveOrder]] = []  # that wait, with their models' keys
        self._running: ModelDownload | ManagedModel | str | None = None
        self._replies: list[PendingReply] = []
        self._num_engines = new.num_engines

    @property
    def hosted(self) -> list[ModelConfig]:
        """The models that each gateway serves."""
        return [each.hosted for each in self._models.values() if not each.is_leaving]

    # ---- requests

    def on_request(self, connection: int, request: ManageRequest) -> list[Action]:
        """Handle a request of a gateway. Call `advance` afterwards."""
        try:
            if not isinstance(request, GetLibrary):
                is_pull = isinstance(request, PullModel)
                self._check_waiting(connection, MAX_PULLING if is_pull else MAX_WAITING)
            match request:
                case PullModel(model=name):
                    return self._pull(connection, name)
                case CopyModel(source=source, destination=destination):
                    return self._copy(connection, source, destination)
                case DeleteModel(model=name):
                    return self._delete(connection, name)
                case GetLibrary():
                    return [SendReply(connection, self._library())]
        except ServingError as error:
            refusal = ControlError(message=error.message, code=error.code, param=error.param)
            return [SendReply(connection, refusal)]

    def on_closed(self, connection: int) -> None:
        """Forget a connection that has ended. Downloads continue."""
        for download in self._downloads.values():
            download.followers.pop(connection, None)
        for model in self._models.values():
            model.deleters = [each for each in model.deleters if each != connection]
        self._replies = [each for each in self._replies if each.connection != connection]

    def _check_waiting(self, connection: int, limit: int) -> None:
        """Raise Overloaded if `limit` other connections wait for a reply."""
        waiting = {each.connection for each in self._replies}
        waiting.update(*(each.followers for each in self._downloads.values()))
        waiting.update(*(each.deleters for each in self._models.values()))
        if len(waiting - {connection}) >= limit:
            raise Overloaded(f"{limit} requests wait for changes of models; try again later")

    def _pull(self, connection: int, name: str) -> list[Action]:
        source = source_of(name)
        if self._owner(name) is not None:
            self._succeed({connection: name})
            return []
        if not source:
            raise _unknown(name)
        served = next((each for each in self._models.values() if each.source == source), None)
        if served is not None and served.is_leaving:
            raise EngineNotReady(f"the model {name} is being deleted; try again later")
        if served is not None:
            self._check_num_names("model")
            actions = self._add_name(served, name)
            self._succeed({connection: name})
            return actions
        download = self._downloads.get(source)
        if download is not None and download.is_cancelled:
            raise EngineNotReady(f"the download of {name} is being cancelled; try again later")
        if download is None or name not in download.names:
            self._check_num_names("model")
        if download is None:
            download = self._new_download(name, source)
        if name not in download.names:
            download.names.append(name)
        download.followers[connection] = name
        return [SendReply(connection, _renamed(download.latest, name))]

    def _new_download(self, name: str, source: str) -> ModelDownload:
        if len(self._downloads) >= MAX_DOWNLOADS:
            raise Overloaded(f"{MAX_DOWNLOADS} downloads are running or waiting; try again later")
        if len(self._models) + len(self._downloads) >= MAX_MODELS:
            raise Overloaded(f"this server has {MAX_MODELS} models; delete one first")
        self._failures.pop(name, None)
        status = "pulling manifest"
        if self._running is not None:
            status = "waiting for another download"
        latest = PullProgress(model=name, status=status)
        download = self._downloads[source] = ModelDownload(source, [name], latest)
        return download

    def _copy(self, connection: int, source: str, destination: str) -> list[Action]:
        model = self._owner(source)
        if model is None:
            raise UnknownModel(f"no model is named {source!r}", param="source")
        if not _NAME.fullmatch(destination) or ".." in destination:
            raise InvalidRequest.at(
                "destination",
                "a name has 1 to 200 letters, digits and . _ - / : @ +, and starts with a letter "
                "or a digit",
            )
        owner = self._owner(destination)
        is_downloaded = any(destination in each.names for each in self._downloads.values())
        if owner not in (None, model) or is_downloaded:
            raise InvalidRequest.at("destination", f"another model is named {destination!r}")
        if owner is None:
            self._check_num_names("destination")
        actions = self._add_name(model, destination)
        self._reply_later(connection)
        return actions

    def _check_num_names(self, field: str) -> None:
        """Raise InvalidRequest for `field` if no model can get one more name."""
        names = [each.names for each in self._models.values()]
        names += [each.names for each in self._downloads.values()]
        if sum(map(len, names)) >= MAX_NAMES:
            raise InvalidRequest.at(field, f"the models have {MAX_NAMES} names already")

    def _delete(self, connection: int, name: str) -> list[Action]:
        for download in self._downloads.values():
            if name in download.names and self._owner(name) is None:
                self._reply_later(connection)
                return self._cancel(download)
        model = self._owner(name)
        if model is None:
            raise UnknownModel(f"no model is named {name!r}", param="model")
        if name in model.own_names:
            raise InvalidRequest.at(
                "model",
                f"{name!r} was given when the server was started; only its operator can remove it",
            )
        rest = [each for each in model.names if each != name]
        if rest:
            self._rename(model, rest)
            self._reply_later(connection)
            return [self._save()]
        model.is_leaving = True
        model.deleters.append(connection)
        self._fleet.retire(model.key)
        model.left_at = self._fleet.touch()
        log = LogAction(f"deleting {name}: it is unloaded as soon as its requests have finished")
        return [log, self._save()]

    def _owner(self, name: str) -> ManagedModel | None:
        """Return the model with this name; None if there is none."""
        return next((each for each in self._models.values() if name in each.names), None)

    def _add_name(self, model: ManagedModel, name: str) -> list[Action]:
        if name in model.names:
            return []
        self._rename(model, [*model.names, name])
        return [self._save()]

    def _rename(self, model: ManagedModel, names: list[str]) -> None:
        model.hosted = msgspec.structs.replace(model.hosted, served_name=names, key=model.key)
        self._fleet.touch()

    # ---- jobs

    def on_job_report(self, report: JobReport) -> list[Action]:
        """Handle a report of the running job that is not the last one."""
        download = self._running
        if not isinstance(report, JobProgress) or not isinstance(download, ModelDownload):
            return []
        download.latest = PullProgress(
            model=download.names[0],
            status=report.status,
            digest=report.digest,
            total=report.total,
            completed=report.completed,
        )
        return [
            SendReply(connection, _renamed(download.latest, name))
            for connection, name in download.followers.items()
        ]

    def on_job_ended(self, result: JobReport | None) -> list[Action]:
        """Handle the end of the running job. Call `advance` afterwards.

        result   its last report; None: it ended without a result
        """
        job, self._running = self._running, None
        if isinstance(job, ModelDownload):
            return self._on_download_ended(job, result)
        if isinstance(job, ManagedModel):
            return self._on_removed(job, result)
        return []

    def _on_download_ended(self, download: ModelDownload, result: JobReport | None) -> list[Action]:
        del self._downloads[download.source]
        if isinstance(result, Pulled) and not download.is_cancelled:
            return self._serve(download, result)
        if download.is_cancelled:
            self._orders.append(("", RemoveOrder(model=download.source, is_partial=True)))
            return self._fail(download, DownloadFailed("the download was cancelled").info())
        error = DownloadFailed(
            "the download ended unexpectedly; the server's log may have the cause"
        )
        info = result.error if isinstance(result, JobFailed) else error.info()
        for name in download.names:
            self._failures[name] = info.message
        for name in list(self._failures)[:-MAX_FAILURES]:
            del self._failures[name]
        return self._fail(download, info)

    def _fail(self, download: ModelDownload, info: ErrorInfo) -> list[Action]:
        return [
            SendReply(connection, PullEnded(model=name, error=info))
            for connection, name in download.followers.items()
        ]

    def _serve(self, download: ModelDownload, pulled: Pulled) -> list[Action]:
        """Serve a model that was downloaded. It is loaded at its first request."""
        names = [name for name in download.names if self._owner(name) is None]
        hosted = msgspec.structs.replace(pulled.hosted, served_name=names)
        command = self._new.command(hosted.supervised_name, pulled.engine)
        paths = loaded_paths(pulled.engine.worker)
        model = ManagedModel(hosted, download.source, paths, child=command.name)
        self._models[model.key] = model
        self._fleet.add(model.key, pulled.planned_bytes)
        self._supervisor.add(command.name, model.key)
        self._groups[command.name] = model.key
        log = LogAction(f"{names[0]} was downloaded, and is served from now on")
        self._succeed(download.followers)
        return [log, AddProcess(command), self._save()]

    def _on_removed(self, model: ManagedModel, result: JobReport | None) -> list[Action]:
        """Forget a model whose files were removed."""
        del self._models[model.key]
        self._fleet.remove(model.key)
        self._supervisor.remove(model.child)
        del self._groups[model.child]
        actions: list[Action] = [RemoveProcess(model.child)]
        if isinstance(result, JobFailed):
            refusal = ControlError(message=result.error.message, code=result.error.code)
            return [*actions, *(SendReply(each, refusal) for each in model.deleters)]
        for connection in model.deleters:
            self._reply_later(connection)
        return actions

    def _cancel(self, download: ModelDownload) -> list[Action]:
        download.is_cancelled = True
        if download is self._running:
            return [StopJob()]
        return self._on_download_ended(download, None)

    def _start_next(self) -> list[Action]:
        """Start the next removal, or else the next download."""
        if self._orders:
            key, order = self._orders.pop(0)
            self._running = self._models.get(key, LEFTOVERS)
            if not order.is_partial:
                # Not earlier: more models may be served than when the removal began to wait.
                others = (each for each in self._models.values() if each.key != key)
                paths = dict.fromkeys(path for each in others for path in each.paths)
                order = msgspec.structs.replace(order, in_use=list(paths))
            return [StartJob(msgspec.json.encode(order))]
        download = next(iter(self._downloads.values()), None)
        if download is None:
            return []
        self._running = download
        self._num_engines += 1
        pull = self._new.order(
            download.source,
            download.names[0],
            key=self._free_key(download.names[0]),
            number=self._num_engines,
            memory_bytes=self._fleet.limits.memory_bytes,
        )
        return [StartJob(msgspec.json.encode(pull))]

    def _free_key(self, name: str) -> str:
        """Return a key for a new model. It differs from `name` if another model has kept that key
        after it lost the name."""
        keys = (name, *(f"{name}#{number}" for number in range(2, len(self._models) + 3)))
        return next(key for key in keys if key not in self._models)

    # ---- what follows from events

    def advance(self) -> list[Action]:
        """Remove the models that are unloaded, start the next job, and send the replies that are
        due. Call this after each event."""
        actions: list[Action] = []
        for model in [each for each in self._models.values() if self._is_removable(each)]:
            model.is_ordered = True
            self._orders.append((model.key, RemoveOrder(model=model.source)))
        if self._running is None:
            actions += self._start_next()
        due = [each for each in self._replies if self._fleet.has_confirmed(each.version)]
        self._replies = [each for each in self._replies if each not in due]
        for each in due:
            actions += [
                SendReply(each.connection, message or self.states()) for message in each.messages
            ]
        return actions

    def _is_removable(self, model: ManagedModel) -> bool:
        """Return whether no gateway has the model any more, and no process of it runs."""
        is_unloaded = model.is_leaving and self._fleet.phase(model.key) in NOT_LOADED
        return is_unloaded and not model.is_ordered and self._fleet.has_confirmed(model.left_at)

    # ---- replies

    def states(self) -> ModelStates:
        return msgspec.structs.replace(self._fleet.states(), hosted=self.hosted)

    def _reply_later(self, connection: int) -> None:
        """Send the states of all models after every gateway has confirmed the current version."""
        self._replies.append(PendingReply(connection, self._fleet.version, [None]))

    def _succeed(self, followers: Mapping[int, str]) -> None:
        """Report the success of a download after every gateway has confirmed the current version.

        followers   connections -> the name that they used
        """
        for connection, name in followers.items():
            success = PullProgress(model=name, status="success")
            messages: list[FromSupervisor] = [success, PullEnded(model=name)]
            self._replies.append(PendingReply(connection, self._fleet.version, messages))

    def _library(self) -> ModelLibrary:
        catalogue = catalogue_entries(self._new.read_bytes_per_s)
        known = {each.name for each in catalogue}
        names = [name for each in self._models.values() for name in each.names]
        names += [name for each in self._downloads.values() for name in each.names]
        names += self._failures
        others = [
            DownloadableModel(name=name) for name in dict.fromkeys(names) if name not in known
        ]
        return ModelLibrary(
            models=[self._described(each) for each in (*catalogue, *others)],
            disk_free_bytes=self._new.disk_free(),
            memory_bytes=self._fleet.limits.memory_bytes,
        )

    def _described(self, entry: DownloadableModel) -> DownloadableModel:
        """Return `entry` with the state of its model."""
        name, owner = entry.name, self._owner(entry.name)
        download = next((each for each in self._downloads.values() if name in each.names), None)
        return msgspec.structs.replace(
            entry,
            is_served=owner is not None,
            is_deletable=owner is not None and name not in owner.own_names,
            pull=None if download is None else _renamed(download.latest, name),
            error=self._failures.get(name, ""),
        )

    def _save(self) -> SaveModels:
        saved = []
        for model in self._models.values():
            added = [name for name in model.names if name not in model.own_names]
            if added:
                own = next(iter(each for each in model.names if each in model.own_names), "")
                source = "" if own else model.source
                saved.append(SavedModel(names=added, source=source, model=own))
        return SaveModels(msgspec.json.encode(saved))


def _renamed(progress: PullProgress, name: str) -> PullProgress:
    return msgspec.structs.replace(progress, model=name)


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(
        f"no model {name!r}: it is neither a name in the catalogue ({', '.join(CATALOGUE)}, "
        f"{', '.join(HUB_MODELS)}) nor OWNER/REPO on the Hugging Face Hub",
        param="model",
    )
