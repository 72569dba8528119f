"""The process that starts and watches the engine and the text process of an LLM.

    python -P -m tools.offline --config JSON

The config is an `OfflineConfig`. The process does what `tidegate serve` does, without a port and
without HTTP. It ends when the script ends or when one of its processes ends. The last line on
stderr has the reason.

The sockets of the processes lie in a directory that this process removes at its end. If it is
killed, the next LLM of this user removes the directory.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.config.base import NO_PATH
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig, ModelConfig
from protocol.config.worker import WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import attach_to_parent
from protocol.sdk.offline_messages import OfflineConfig
from protocol.wire.field_errors import field_error
from tools.commands.models import resolve
from tools.failure import Failure
from tools.flags import flags_of
from tools.models.fetch import home
from tools.models.preflight import ModelCheck, check_device, check_models, without_trial
from tools.models.trials import PassedTrials
from tools.other_servers import advice_on_field
from tools.processes import run_lock
from tools.processes.children import Child, Command, module_command
from tools.processes.engine_probe import EngineProbe
from tools.processes.serve_commands import engine_command
from tools.processes.start_checks import check_installation, check_paths
from tools.processes.topology import with_model
from tools.processes.watch import STOP_SIGNALS, supervise
from tools.terminal import Terminal

MODEL_OPTIONS = frozenset(ModelConfig.__struct_fields__) | {"max_n", "max_prompts", "max_body_mib"}
"""Options of the gateway that do not concern HTTP."""
STOP_S = 5.0
C = TypeVar("C", bound=msgspec.Struct)


def new_directory() -> Path:
    """Return a path for a new run directory, which does not exist yet. Its parent holds the
    directories of all LLMs of this user."""
    base = Path(tempfile.gettempdir()) / f"tidegate-llm-{os.getuid()}"
    return base / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def plan(config: OfflineConfig, directory: Path) -> tuple[GatewayConfig, EngineConfig]:
    """Return the configs that the options describe. Raises Failure for a wrong option.

    directory   for the sockets of the engine and the worker
    """
    address = f"ipc://{directory / 'engine.sock'}"
    left = dict(config.options)
    worker = _build(
        WorkerConfig, left, model=config.model, address=f"ipc://{directory / 'worker.sock'}"
    )
    engine = _build(EngineConfig, left, worker=msgspec.to_builtins(worker), address=address)
    fixed = {"engine": address, "response_store": NO_PATH, "file_store": NO_PATH}
    gateway = _build(GatewayConfig, left, only=MODEL_OPTIONS, log_requests=False, **fixed)
    if left:
        hint = advice_on_field(min(left), _names())
        words = f"{min(left)}: unknown option" + (f"; {hint}" if hint else "")
        raise Failure(words, exit_code=ExitCode.USAGE)
    return gateway, engine


def _names() -> dict[str, str]:
    """Return the command's option for each name that a script may use, and the name."""
    gateway = [flag for flag in flags_of(GatewayConfig) if flag.field in MODEL_OPTIONS]
    flags = (*flags_of(WorkerConfig), *flags_of(EngineConfig), *gateway)
    return {flag.name: flag.field for flag in flags}


def _build(
    kind: type[C], left: dict[str, Any], *, only: frozenset[str] | None = None, **fixed: Any
) -> C:
    """Build a config from the options in `left` that are fields of `kind`, and remove them from it.

    only   the options that may be set; None: all
    """
    names = {flag.field for flag in flags_of(kind)}
    own = {name: left.pop(name) for name in left.keys() & (names if only is None else names & only)}
    values = {**own, **fixed}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        words = str(field_error(error, values, kind))
        raise Failure(words, exit_code=ExitCode.USAGE) from None


def run(config: OfflineConfig) -> int:
    """Start the processes, and watch them until they end. Return the exit code. Raises Failure if
    the model cannot be served."""
    directory = new_directory()
    gateway, engine = plan(config, directory)
    check_installation(["flask", "gevent", "gunicorn", "torch"])
    options = msgspec.structs.asdict(engine) | msgspec.structs.asdict(engine.worker)
    check_paths([EngineConfig, WorkerConfig], options)
    check_device(engine.worker.device)
    draft = engine.worker.draft_model
    path = resolve(engine.worker.model, home())
    engine = with_model(engine, path, resolve(draft, home()) if draft else None)
    card = check_models(engine.checked_workers).card
    assert card is not None
    trials = PassedTrials(home() / "trials")
    if gateway.hosted[0].names_formats or not trials.has_passed(
        engine.worker.model, card.tokenizer
    ):
        with ModelCheck(gateway) as check:
            check.run(card)
        trials.add(engine.worker.model, card.tokenizer)
    with run_lock.holding(directory) as lock:
        code = supervise(
            _commands(config.socket, lock, without_trial(gateway, card), engine),
            EngineProbe(engine, "offline"),
            Terminal(),
            start_timeout_s=config.start_timeout_s,
            drain_s=STOP_S,
            on_started=_ignore,
            on_listening=lambda: None,
            on_ready=_ignore,
        )
        for number in (*STOP_SIGNALS, signal.SIGQUIT):  # none may interrupt the removal
            signal.signal(number, signal.SIG_IGN)
    return code


def _ignore(value: Sequence[Child] | str | None) -> None:
    pass


def _commands(
    socket: int, lock: int, gateway: GatewayConfig, engine: EngineConfig
) -> list[Command]:
    """Return the text process and the engine.

    socket   descriptor of the text process's socket
    lock     descriptor of the lock of the run directory
    """
    environment: Mapping[str, str] = gateway.to_environment()
    text = Command(
        "text process",
        module_command("gateway.offline", str(socket)),
        environment=environment,
        directory=Path(engine.address.removeprefix("ipc://")).parent,
        keeps_open=[socket, lock],
        exit_code=ExitCode.GATEWAY_LOST,
        exit_codes={ExitCode.USAGE: ExitCode.USAGE, ExitCode.BAD_MODEL: ExitCode.BAD_MODEL},
    )
    return [text, engine_command("engine", engine, lock)]


def main() -> int:
    attach_to_parent(signal.SIGQUIT)
    config = msgspec.json.decode(sys.argv[2], type=OfflineConfig)
    try:
        return run(config)
    except Failure as failure:
        Terminal().fail(str(failure))
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
