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

from protocol.devices import DeviceHolder
from protocol.facts import MachineFacts
from protocol.preflight import GIB, ModelPlan, Preflight
from protocol.rooms import REMEDY, RoomTrouble

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
        return Finding(
            "packages", "protocol, gateway, engine_core, worker and tools are Tidegate's own"
        )
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


def device(facts: MachineFacts, holders: Sequence[DeviceHolder]) -> Finding:
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
    """Return the free memory of the device, if no model is known."""
    return Finding("memory", f"{facts.free_bytes / GIB:.1f} GiB free")


def model(found: Preflight) -> list[Finding]:
    """Return what a model is, and whether it fits into memory with default options. A server that
    fails these checks does not start."""
    if found.error:
        what = "memory" if found.is_memory else "model"
        return [Finding(what, found.error, Verdict.BAD, found.remedy)]
    return [each for plan in found.plans for each in (_model(plan), _model_memory(plan))]


def _model(plan: ModelPlan) -> Finding:
    said = f"{plan.name}: {plan.architecture}, made for {plan.context_tokens:,} tokens"
    if plan.window is None:
        return Finding("model", said)
    said = f"{plan.name}: {plan.architecture}, with an attention window of {plan.window:,} tokens"
    remedy = (
        "no action needed; requests are limited to the window, as longer ones are not supported"
    )
    return Finding("model", said, Verdict.DOUBT, remedy)


def _model_memory(plan: ModelPlan) -> Finding:
    form = plan.dtype + "".join(f", {kind} is expanded" for kind in plan.expanded)
    said = (
        f"{_gib(plan.free_bytes)} free; {_gib(plan.weights_bytes)} for weights ({form}), "
        f"{_gib(plan.kv_bytes)} for K/V, {_gib(plan.work_bytes)} for working memory"
    )
    if plan.max_len == plan.context_tokens:
        return Finding("memory", f"{said}; requests of up to {plan.max_len:,} tokens")
    said = f"{said}; requests of up to {plan.max_len:,} of {plan.context_tokens:,} tokens"
    return Finding("memory", said, Verdict.DOUBT, _for_longer_requests(plan))


def _for_longer_requests(plan: ModelPlan) -> str:
    """Return the option that allows longer requests if the memory suffices for them."""
    needed = plan.kv_bytes / plan.max_len * plan.context_tokens * 1.01
    if needed <= plan.free_bytes - plan.weights_bytes - plan.work_bytes:
        return f"for the longest requests, set --kv-memory-gib {needed / GIB:.2f}"
    return f"no action needed; to accept this limit, set --max-len {plan.max_len}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


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
