"""What is said of a machine before a server is started on it. Pure: facts in, findings out.

Each check looks at one thing, says what it found in numbers, and, where that is not well, what to
do about it. BAD: a server would not start, or would be of no use; DOUBT: it would, but not as well
as it could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from protocol.devices import Holder
from protocol.facts import MachineFacts, ModelFacts
from protocol.rooms import REMEDY, RoomTrouble

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)
ENOUGH_FILES = 4096
"""Descriptors: a gateway has one per open connection."""
ENOUGH_DISK = GIB
OTHERS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


class Verdict(Enum):
    OK = "ok"
    DOUBT = "doubt"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy`: what to do, where not all is well."""

    what: str
    said: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def python(version: tuple[int, int, int]) -> Finding:
    said = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Finding("python", said, Verdict.BAD, "install Python 3.11 or newer")
    return Finding("python", said)


def packages(troubles: Sequence[RoomTrouble]) -> Finding:
    """Tidegate's own packages, whose names other distributions may use as well."""
    if not troubles:
        return Finding("packages", "protocol, gateway, engine_core, worker and tools are ours")
    is_bad = any(trouble.is_fatal for trouble in troubles)
    said = "; ".join(trouble.said for trouble in troubles)
    return Finding("packages", said, Verdict.BAD if is_bad else Verdict.DOUBT, REMEDY)


def libraries(found: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """found: extra -> library -> its version, None where it is not installed."""
    return [_extra(extra, versions) for extra, versions in found.items()]


def _extra(extra: str, versions: Mapping[str, str | None]) -> Finding:
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        remedy = f"pip install 'tidegate[{extra}]', unless another machine has this part"
        return Finding(extra, f"not installed: {', '.join(missing)}", Verdict.BAD, remedy)
    told = [f"{name} {version}" for name, version in versions.items()]
    return Finding(extra, ", ".join(told))


def processor(facts: MachineFacts) -> Finding:
    flags = set(facts.cpu_flags)
    said = " ".join(filter(None, [facts.cpu, f"({', '.join(facts.cpu_flags)})" if flags else ""]))
    if facts.device != "cpu" or flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Finding("cpu", said)
    if flags & {"avx2", "asimd", "neon"}:
        remedy = "nothing is wrong; weights take twice the memory, as the CPU has no bfloat16"
        return Finding("cpu", said, Verdict.DOUBT, remedy)
    return Finding("cpu", said or "unknown", Verdict.DOUBT, "expect it to be slow: no AVX2 or NEON")


def threads(facts: MachineFacts, environment: Mapping[str, str]) -> Finding:
    limits = [] if facts.quota is None else [f"{facts.quota:g} granted to this container"]
    said = f"{facts.threads} of {facts.cores} cores"
    said += f" ({', '.join(limits)})" if limits else ""
    named = [name for name in OTHERS_THREADS if name in environment]
    if named:
        told = ", ".join(f"{name}={environment[name]}" for name in named)
        remedy = f"unset {' '.join(named)}: the worker plans its threads itself (--threads)"
        return Finding("threads", f"{said}; {told}", Verdict.DOUBT, remedy)
    if facts.quota is not None and facts.quota < 1:
        return Finding("threads", said, Verdict.DOUBT, "grant the container a whole core at least")
    return Finding("threads", said)


def compute(facts: MachineFacts) -> Finding:
    where = facts.device + (f" ({facts.device_name})" if facts.device_name else "")
    return Finding("compute", f"torch {facts.torch}, {where}, {facts.dtype}")


def device(facts: MachineFacts, holders: Sequence[Holder]) -> Finding:
    """Of a GPU: who computes on it."""
    if not holders:
        return Finding("device", f"{facts.device_id}, nobody's")
    said = f"{facts.device_id}, in use by {' and '.join(holder.told for holder in holders)}"
    if all(holder.shares for holder in holders):
        remedy = "share it (--share-device), or take another (--device cuda:N)"
        return Finding("device", said, Verdict.DOUBT, remedy)
    remedy = "take another (--device cuda:N), stop that (tidegate ps), or let both --share-device"
    return Finding("device", said, Verdict.BAD, remedy)


def memory(facts: MachineFacts) -> Finding:
    """Of the device, for the model if one is known."""
    said = f"{facts.free_bytes / GIB:.1f} GiB free"
    model = facts.model
    if model is None:
        return Finding("memory", said)
    weights, request = model.weights_bytes, model.context_tokens * model.token_bytes
    said += (
        f"; {model.name} takes {weights / GIB:.2f} GiB, and {request / GIB:.2f} GiB for one "
        f"request of {model.context_tokens:,} tokens"
    )
    left = facts.free_bytes - weights
    if left <= 0:
        remedy = "a smaller model, a more quantised one, or more memory"
        return Finding("memory", said, Verdict.BAD, remedy)
    if left < request:
        longest = _round_down(left // 2 // model.token_bytes)
        remedy = f"serve shorter requests: --max-len {longest}"
        return Finding("memory", said, Verdict.DOUBT, remedy)
    return Finding("memory", said)


def _round_down(tokens: int) -> int:
    """To a power of two: a number that reads as a choice."""
    return 1 << max(tokens.bit_length() - 1, 0)


def model(facts: MachineFacts) -> Finding:
    if facts.model is None:
        return Finding("model", facts.model_error, Verdict.BAD, "tidegate models lists known ones")
    return Finding("model", _model(facts.model))


def _model(model: ModelFacts) -> str:
    return f"{model.name}: {model.architecture}, made for {model.context_tokens:,} tokens"


def port(number: int, trouble: str | None, server: int | None) -> Finding:
    """trouble: why nobody can listen there; server: the pid of ours that does."""
    what = f"port {number}"
    if server is not None:
        return Finding(what, f"a Tidegate server runs here (pid {server}); see tidegate status")
    if trouble is not None:
        return Finding(what, trouble, Verdict.BAD, "another one: --port N, or --host")
    return Finding(what, "free")


def sockets(directory: Path, trouble: str | None) -> Finding:
    """trouble: why its sockets cannot be there."""
    if trouble is not None:
        remedy = "set XDG_RUNTIME_DIR to a directory of yours with a short path"
        return Finding("sockets", trouble, Verdict.BAD, remedy)
    return Finding("sockets", f"in {directory}, which is private")


def open_files(limit: int) -> Finding:
    """limit: what the shell gives, raised to what it may give."""
    said = f"{limit:,} at once"
    if limit < ENOUGH_FILES:
        remedy = f"ulimit -n {ENOUGH_FILES}; a connection takes one"
        return Finding("open files", said, Verdict.DOUBT, remedy)
    return Finding("open files", said)


def cache(directory: Path, free_bytes: int | None, trouble: str | None) -> Finding:
    if trouble is not None:
        remedy = "set TIDEGATE_HOME to a directory that you may write to"
        return Finding("cache", trouble, Verdict.BAD, remedy)
    assert free_bytes is not None
    said = f"{directory}, {free_bytes / GIB:.1f} GiB free on its disk"
    if free_bytes < ENOUGH_DISK:
        remedy = "make room, or set TIDEGATE_HOME to another disk"
        return Finding("cache", said, Verdict.DOUBT, remedy)
    return Finding("cache", said)


def worst(findings: Sequence[Finding]) -> Verdict:
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)
