"""A process that downloads or removes a model while a server runs.

    python -P -m tools.processes.model_job ORDER

ORDER is a `PullOrder` or a `RemoveOrder` as JSON. The process prints `JobReport`s, one JSON text in
each line, the last one of which has the result. Lines for people go to stderr. The supervisor
starts one such process at a time, so that the check of the disk's free space holds for each.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig, ModelConfig
from protocol.engine.model_card import CardFile, write_card
from protocol.process.exit_codes import KILLED
from protocol.process.lifeline import attach_if_supervised
from protocol.wire.errors import (
    DiskFull,
    DownloadFailed,
    EngineNotReady,
    ErrorInfo,
    InvalidRequest,
    ServingError,
    UnknownModel,
)
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE
from tools.models.download import FileProgress, NoDownload, NoSpace
from tools.models.fetch import fetch, format_size, home, print_on_stderr
from tools.models.preflight import (
    ModelCheck,
    preflight_alternatives,
    tokenizer_digest,
    with_recommended,
)
from tools.models.pulling import download_name, pull_model
from tools.models.stored import (
    files_in_use,
    hub_cache,
    remove_leftovers,
    remove_stored,
    stored_models,
)
from tools.models.trials import PassedTrials
from tools.processes.several_models import planned_bytes, with_sizes
from tools.processes.topology import with_model

SEE_LOG = "the server's log has the cause"
REPORT_S = 0.1
"""Shortest time between two reports about the same file."""


class PullOrder(msgspec.Struct, frozen=True, tag="pull", kw_only=True):
    """Download a model, and prepare its engine."""

    #: A name of the catalogue or of a model on the Hub (`tools.models.names`).
    model: str
    #: The engine of the model, without its path and the size of its K/V cache.
    engine: EngineConfig
    #: The gateways' config of the model.
    hosted: ModelConfig
    #: File to which its model card is written.
    card: str
    #: Memory of the device that all models may use together; 0: what is free now.
    memory_bytes: int


class RemoveOrder(msgspec.Struct, frozen=True, tag="remove", kw_only=True):
    """Remove a model from the cache."""

    #: Name of its download.
    model: str
    #: Directories and files that other models of the server load. They stay.
    in_use: list[str] = []
    #: Whether only the partial files of its download are removed. Complete files may be those of
    #: other programs.
    is_partial: bool = False


Order = PullOrder | RemoveOrder


class JobProgress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True, kw_only=True):
    """A stage of a download, or its progress with one file. `PullProgress` has the same fields."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class Pulled(msgspec.Struct, frozen=True, tag="pulled", kw_only=True):
    """A model that can be served."""

    engine: EngineConfig
    hosted: ModelConfig
    planned_bytes: int


class Removed(msgspec.Struct, frozen=True, tag="removed", kw_only=True):
    """A model that was removed."""

    freed_bytes: int


class JobFailed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The order could not be carried out. The message names no file and no address, because clients
    receive it; stderr has the whole cause."""

    error: ErrorInfo


JobResult = Pulled | Removed | JobFailed
JobReport = JobProgress | Pulled | Removed | JobFailed


class ProgressReporter:
    """Reports the progress of a download, but not each piece.

    report   receives the reports
    clock    returns the time in seconds
    """

    def __init__(
        self,
        report: Callable[[JobProgress], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._clock = report, clock
        self._digest, self._at = "", 0.0

    def on_progress(self, progress: FileProgress) -> None:
        """Report the progress of a file if the file is another one or complete, or if the last
        report is REPORT_S ago."""
        now = self._clock()
        is_due = progress.digest != self._digest or now - self._at >= REPORT_S
        if not is_due and progress.completed < progress.total:
            return
        self._digest, self._at = progress.digest, now
        short = progress.digest.rpartition(":")[2][:12]
        self._report(
            JobProgress(
                status=f"pulling {short}",
                digest=progress.digest,
                total=progress.total,
                completed=progress.completed,
            )
        )


def pull(order: PullOrder, report: Callable[[JobProgress], object]) -> Pulled:
    """Download a model, and return how it is served. Raises Failure."""
    report(JobProgress(status="pulling manifest"))
    reporter = ProgressReporter(report)
    if entry := CATALOGUE.get(order.model):
        path = fetch(entry, home(), print_on_stderr, reporter.on_progress)
    else:
        name = download_name(order.model)
        pulled = pull_model(name, home(), print_on_stderr, reporter.on_progress)
        path = Path(pulled.path)
    report(JobProgress(status="verifying sha256 digest"))  # done while it was received
    engine = with_model(order.engine, path)
    (found,) = preflight_alternatives([engine.worker], order.memory_bytes)
    if found.error:
        raise UnservableModel(found.error.replace(str(path), order.model))
    assert found.card is not None
    (plan,) = found.plans
    hosted = msgspec.structs.replace(
        order.hosted, expected_card=order.card, tried_tokenizer=tokenizer_digest(found.card)
    )
    trials = PassedTrials(home() / "trials")
    if hosted.names_formats or not trials.has_passed(str(path), found.card.tokenizer):
        with ModelCheck(GatewayConfig(models=[hosted])) as check:
            check.run(found.card)
        trials.add(str(path), found.card.tokenizer)
    report(JobProgress(status="writing manifest"))
    card = with_recommended(found.card, engine.worker)
    write_card(Path(order.card), CardFile(card=card, max_len=plan.max_len))
    return Pulled(engine=with_sizes(engine, plan), hosted=hosted, planned_bytes=planned_bytes(plan))


def remove(order: RemoveOrder) -> Removed:
    """Remove a model, but no other revision of it. Files that other models of the server or of the
    cache use stay. Raises Failure or OSError."""
    if order.is_partial:
        remove_leftovers(order.model, home(), hub_cache())
        return Removed(freed_bytes=0)
    found = [each for each in stored_models(home()) if each.name == order.model]
    if not found:
        raise Failure(f"{order.model} is not in the cache")
    in_use = files_in_use(order.in_use)
    # A record precedes a newer snapshot of the same name that another program has downloaded.
    return Removed(freed_bytes=remove_stored(home(), found[:1], in_use=in_use))


class UnservableModel(Failure):
    """This machine cannot serve a model that was downloaded."""


def error_of(failure: Exception, model: str) -> ServingError:
    """Return what a client receives about the failure of a download."""
    match failure:
        case NoSpace(needed=needed, free=free):
            sizes = f"{format_size(needed)} needed, {format_size(free)} free"
            return DiskFull(f"not enough disk space for {model}: {sizes}")
        case NoDownload(cause="unknown"):
            return UnknownModel(
                f"no model {model!r} in the catalogue or on the Hugging Face Hub, or it is private",
                param="model",
            )
        case NoDownload(cause="terms"):
            return InvalidRequest.at(
                "model", f"{model} is only for users who accepted its terms on the Hub"
            )
        case NoDownload(cause="network"):
            return DownloadFailed(
                f"the download of {model} was interrupted, or the Hub cannot be reached; pull the "
                "model again to continue"
            )
        case UnservableModel():
            return InvalidRequest.at("model", f"{model} cannot be served here: {failure}")
    return DownloadFailed(f"the download of {model} failed; {SEE_LOG}")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(KILLED + number))
    attach_if_supervised(signal.SIGTERM)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is for people

    def report(each: JobReport) -> None:
        output.write(msgspec.json.encode(each) + b"\n")
        output.flush()

    order: Order = msgspec.json.decode(sys.argv[1], type=Order)
    try:
        result: JobResult = pull(order, report) if isinstance(order, PullOrder) else remove(order)
    except (Failure, OSError) as error:
        print_on_stderr(f"model {order.model}: {error}")
        problem: ServingError = (
            error_of(error, order.model)
            if isinstance(order, PullOrder)
            else EngineNotReady(f"the files of {order.model} could not be removed; {SEE_LOG}")
        )
        result = JobFailed(error=problem.info())
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
