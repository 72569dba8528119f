"""`tidegate doctor`: what a server would find on this machine, before one is started.

Facts are gathered here, each in its own way; what they mean is said in findings.py. Nothing is
changed, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from protocol import devices
from protocol.config.gateway import GatewayConfig
from protocol.config.worker import WorkerConfig
from protocol.facts import MachineFacts
from protocol.rooms import check_rooms
from protocol.sockets import MAX_IPC_PATH, run_directory
from tools import findings
from tools.failure import Failure
from tools.findings import Finding, Verdict
from tools.flags import flags_of
from tools.models.catalogue import CATALOGUE
from tools.models.fetch import home, is_cached, place
from tools.models.preflight import preflight
from tools.processes.run_lock import check_port_is_free, holder

DESCRIPTION = """\
Look at this machine as a server would: libraries, CPU and threads, memory for MODEL, ports, sockets
and files. Each line is a verdict; what is not well comes with a remedy. Changes nothing. Exit code
1 if something is bad.
"""

EXAMPLES = """\
examples:
  tidegate doctor
  tidegate doctor ~/models/qwen3-4b --port 9000
  tidegate doctor --json | jq '.[] | select(.verdict != "ok")'
"""

EXTRAS = ("gateway", "engine", "worker")
FACTS_TIMEOUT_S = 120
LONGEST_NAME = "worker.sock"
NAME = re.compile(r"[\w.-]+")
"""How a requirement begins."""
MARKS = {Verdict.OK: "ok", Verdict.DOUBT: "doubt", Verdict.BAD: "BAD"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options = {flag.field: flag for flag in flags_of(GatewayConfig)}
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model to look at as well: a directory, a .gguf file or a name",
    )
    for field in ("host", "port"):
        flag = options[field]
        parser.add_argument(
            flag.name, default=flag.default, type=flag.read, metavar=flag.metavar, help=flag.help
        )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    found = []
    for finding in examine(options.model, options.host, options.port):
        found.append(finding)
        if not options.json:
            print(told(finding), flush=True)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return int(findings.worst(found) is Verdict.BAD)


def told(finding: Finding) -> str:
    line = f"{MARKS[finding.verdict]:<6} {finding.what:<10}  {finding.said}"
    return line + (f"\n{'':19}-> {finding.remedy}" if finding.remedy else "")


def examine(model: str | None, host: str, port: int) -> Iterator[Finding]:
    """One finding after the other, the quick ones first."""
    yield findings.python(sys.version_info[:3])
    yield findings.packages(check_rooms(thorough=True))
    libraries = {extra: versions for extra in EXTRAS if (versions := _versions(extra))}
    yield from findings.libraries(libraries)
    yield findings.port(port, _port_trouble(host, port), holder(run_directory(port)))
    directory = run_directory(port)
    yield findings.sockets(directory, _sockets_trouble(directory))
    yield findings.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield _cache()
    if None not in libraries.get("worker", {}).values():
        yield from _worker(model)


def _worker(model: str | None) -> Iterator[Finding]:
    path, trouble = _path_of(model)
    facts = _machine_facts()
    if isinstance(facts, str):
        remedy = "pip install --force-reinstall 'tidegate[worker]'"
        yield Finding("worker", facts, Verdict.BAD, remedy)
        return
    yield findings.processor(facts)
    yield findings.threads(facts, os.environ)
    yield findings.compute(facts)
    if facts.device_id:
        yield findings.device(facts, devices.holders(devices.directory() / facts.device_id))
    if trouble is not None:
        yield trouble
    if path is None:
        yield findings.memory(facts)
        return
    try:
        yield from findings.model(preflight([WorkerConfig(model=str(path))]))
    except Failure as failure:
        yield Finding("model", str(failure), Verdict.BAD, "tidegate models lists known ones")


def _path_of(model: str | None) -> tuple[Path | None, Finding | None]:
    """Where a model is, without fetching it; what there is to say where it is nowhere."""
    if model is None:
        return None, None
    entry = CATALOGUE.get(model)
    if entry is None:
        return Path(model).expanduser().absolute(), None
    if is_cached(entry, home()):
        return place(entry, home()), None
    megabytes = entry.wheel_bytes / 1e6
    said = f"{model} is not here yet; `tidegate serve` fetches it ({megabytes:.0f} MB)"
    return None, Finding("model", said)


def _machine_facts() -> MachineFacts | str:
    """From the worker's own room, since only that imports torch; or why there are none."""
    command = [sys.executable, "-P", "-m", "worker.startup.facts"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FACTS_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"does not start within {FACTS_TIMEOUT_S} s"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ends with code {done.returncode}"
    return msgspec.json.decode(done.stdout, type=MachineFacts)


def _versions(extra: str) -> dict[str, str | None]:
    """library -> installed version, of those that the package declares for this extra."""
    declared = metadata.requires("tidegate") or []
    marker = f'extra == "{extra}"'
    named = [NAME.match(text) for text in declared if marker in text]
    return {found[0]: _version(found[0]) for found in named if found}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _port_trouble(host: str, port: int) -> str | None:
    try:
        check_port_is_free(host, port)
    except Failure as failure:
        return str(failure)
    return None


def _sockets_trouble(directory: Path) -> str | None:
    path = directory / LONGEST_NAME
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        return f"{path} is longer than the {MAX_IPC_PATH} bytes that a socket's path may have"
    nearest = _nearest(directory.parent)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written to"
    for part in (directory.parent, directory):
        if part.exists() and (part.stat().st_uid != os.getuid() or part.stat().st_mode & 0o077):
            return f"{part} is not private: its owner is another, or others may enter"
    return None


def _cache() -> Finding:
    directory = home()
    nearest = _nearest(directory)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return findings.cache(directory, None, f"{nearest} cannot be written to")
    return findings.cache(directory, shutil.disk_usage(nearest).free, None)


def _nearest(directory: Path) -> Path:
    """It, or the first folder above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())
