"""The findings of `tidegate doctor`: each function turns the facts about one subject into findings.

The functions do not collect the facts. A finding states a fact with its numbers, and a remedy if
there is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from protocol.process.devices import DeviceHolder
from protocol.process.installation import install_command, own_environment_remedy
from protocol.process.packages import PackageProblem
from protocol.tools.start_facts import GIB, MachineFacts, ModelPlan, Preflight

OLDEST_PYTHON = (3, 11)
ENOUGH_FILES = 4096
"""Number of file descriptors that suffices. A gateway needs one per open connection."""
ENOUGH_DISK = GIB


class Verdict(Enum):
    OK = "ok"
    DOUBT = "doubt"  # a server would run, but worse than it could
    BAD = "bad"  # a server would not start, or would be unusable


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `tidegate doctor --json` prints these fields."""

    #: The subject of the check, such as "memory".
    subject: str = msgspec.field(name="what")
    #: The fact that the check found.
    fact: str = msgspec.field(name="said")
    verdict: Verdict = Verdict.OK
    #: What to do about a problem; "" if there is none.
    remedy: str = ""


def python(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Finding("python", text, Verdict.BAD, "install Python 3.11 or newer")
    return Finding("python", text)


def packages(problems: Sequence[PackageProblem]) -> Finding:
    """Judge the problems of Tidegate's installed packages, which another distribution may
    overwrite."""
    if not problems:
        return Finding(
            "packages",
            "protocol, gateway, engine_core, worker, tools and simulator are Tidegate's own",
        )
    is_bad = any(problem.is_fatal for problem in problems)
    text = "; ".join(problem.message for problem in problems)
    return Finding(
        "packages", text, Verdict.BAD if is_bad else Verdict.DOUBT, own_environment_remedy()
    )


def libraries(found: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """Judge the installed libraries of each extra.

    found   extra -> library -> its version, or None if it is missing
    """
    return [_extra(extra, versions) for extra, versions in found.items()]


def _extra(extra: str, versions: Mapping[str, str | None]) -> Finding:
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        remedy = f"{install_command(extra)}, unless this part runs on another machine"
        return Finding(extra, f"not installed: {', '.join(missing)}", Verdict.BAD, remedy)
    return Finding(extra, ", ".join(f"{name} {version}" for name, version in versions.items()))


def processor(facts: MachineFacts) -> Finding:
    flags = set(facts.cpu_flags)
    text = " ".join(filter(None, [facts.cpu, f"({', '.join(facts.cpu_flags)})" if flags else ""]))
    if facts.device != "cpu" or flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Finding("cpu", text)
    if flags & {"avx2", "asimd", "neon"}:
        remedy = "no action needed; weights take twice the memory because the CPU has no bfloat16"
        return Finding("cpu", text, Verdict.DOUBT, remedy)
    remedy = "no action possible; it will be slow because the CPU has neither AVX2 nor NEON"
    return Finding("cpu", text or "unknown", Verdict.DOUBT, remedy)


def threads(facts: MachineFacts) -> Finding:
    text = f"{facts.threads} of {facts.cores} cores"
    text += "" if facts.quota is None else f" (this container may use {facts.quota:g})"
    if facts.quota is not None and facts.quota < 1:
        return Finding("threads", text, Verdict.DOUBT, "give the container at least one core")
    return Finding("threads", text)


def environment(ignored: Sequence[str]) -> Finding:
    """Judge the variables of the environment that the processes of a server do not get."""
    if not ignored:
        return Finding("environment", "no variable is ignored")
    remedy = "use options instead (docs/operate/configuration.md)"
    return Finding("environment", f"ignored: {', '.join(ignored)}", Verdict.DOUBT, remedy)


def compute(facts: MachineFacts) -> Finding:
    name = facts.device + (f" ({facts.device_name})" if facts.device_name else "")
    torch = f"torch {facts.torch} for {facts.torch_build}"
    return Finding("compute", f"{torch}, {name}, {facts.dtype}")


def gpus(facts: MachineFacts) -> list[Finding]:
    """Judge the GPUs, their driver, and whether torch can use them. A machine needs none."""
    driver = facts.driver
    if facts.torch_build.startswith("HIP"):
        return []  # the GPUs are AMD's, and only torch lists them
    if not driver.gpus:
        return [Finding("gpu", f"none: {driver.problem}")]
    found = [
        Finding(
            "gpu",
            f"cuda:{index}: {gpu.name}, compute capability {gpu.capability[0]}."
            f"{gpu.capability[1]}, {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free",
        )
        for index, gpu in enumerate(driver.gpus)
    ]
    version = f"{driver.version or 'of unknown version'}, up to CUDA {_dotted(driver.cuda)}"
    if facts.gpu_problem:
        text = f"{version}; not used, because {facts.gpu_problem}"
        found.append(Finding("driver", text, Verdict.DOUBT, facts.gpu_remedy))
    else:
        found.append(Finding("driver", version))
    return [*found, _gpu_libraries(facts)]


def _gpu_libraries(facts: MachineFacts) -> Finding:
    """Judge the libraries with which a GPU computes faster than with torch alone."""
    attention = ", ".join(facts.attention) or "no FlashAttention library"
    if not facts.triton:
        remedy = f"{install_command('cuda')}; without triton, torch alone computes slowly"
        return Finding("gpu code", f"no triton; {attention}", Verdict.DOUBT, remedy)
    if not facts.c_compiler:
        remedy = "install gcc: triton needs a C compiler at its first launch"
        text = f"triton {facts.triton}, no C compiler; {attention}"
        return Finding("gpu code", text, Verdict.DOUBT, remedy)
    return Finding("gpu code", f"triton {facts.triton}; {attention}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def device(facts: MachineFacts, holders: Sequence[DeviceHolder]) -> Finding:
    """Judge whether the GPU is free. `holders` are the processes that use it."""
    if not holders:
        return Finding("device", f"{facts.device_id}, free")
    text = f"{facts.device_id}, in use by {' and '.join(holder.description for holder in holders)}"
    if all(holder.shares for holder in holders):
        remedy = "share it (--share-device), or use another one (--device cuda:N)"
        return Finding("device", text, Verdict.DOUBT, remedy)
    remedy = (
        "use another one (--device cuda:N), stop the other process (tidegate ps), or start both "
        "with --share-device"
    )
    return Finding("device", text, Verdict.BAD, remedy)


def memory(facts: MachineFacts) -> Finding:
    """Return the free memory of the device, for a check without a model."""
    return Finding("memory", f"{facts.free_bytes / GIB:.1f} GiB free")


def undownloaded(name: str, needed_bytes: int, facts: MachineFacts) -> Finding:
    """Judge whether a model of the catalogue fits this machine before its download.

    needed_bytes   the memory that it needs, by the estimate of the catalogue; so a model that does
                   not fit is a doubt
    """
    text = (
        f"{name} is not downloaded yet; `tidegate serve` downloads it. It needs about "
        f"{needed_bytes / GIB:.1f} GiB of memory"
    )
    if needed_bytes <= facts.free_bytes:
        return Finding("model", text)
    text += f", and {facts.free_bytes / GIB:.1f} GiB are free"
    return Finding("model", text, Verdict.DOUBT, "choose a smaller one: tidegate models")


def model(found: Preflight) -> list[Finding]:
    """Judge whether a server with default options can load a model.

    found   the result of the check by a worker process
    """
    if found.error:
        what = "memory" if found.is_memory else "model"
        return [Finding(what, found.error, Verdict.BAD, found.remedy)]
    return [
        each
        for plan in found.plans
        for each in (_model(plan), _model_memory(plan), *_states(plan), *_images(plan))
    ]


def _model(plan: ModelPlan) -> Finding:
    text = f"{plan.name}: {plan.architecture}, context of {plan.context_tokens:,} tokens"
    return Finding("model", text)


def _model_memory(plan: ModelPlan) -> Finding:
    form = plan.dtype + "".join(f", {kind} is expanded" for kind in plan.expanded)
    text = (
        f"{_gib(plan.free_bytes)} free; {_gib(plan.weights_bytes)} for weights ({form}), "
        f"{_gib(plan.kv_bytes) if plan.has_kv else 'none'} for K/V, "
        f"{_gib(plan.work_bytes)} for working memory"
    )
    if plan.state_bytes:
        text += f" ({_gib(plan.state_bytes)} of it for recurrent states)"
    if plan.image_bytes:
        text += f", {_gib(plan.image_bytes)} for images"
    if plan.max_len == plan.context_tokens:
        return Finding("memory", f"{text}; requests of up to {plan.max_len:,} tokens")
    text = f"{text}; requests of up to {plan.max_len:,} of {plan.context_tokens:,} tokens"
    return Finding("memory", text, Verdict.DOUBT, _for_longer_requests(plan))


def _images(plan: ModelPlan) -> list[Finding]:
    """Name the reason if a model that reads images has no usable encoder."""
    if not plan.image_refusal:
        return []
    remedy = "pull the model by its name on the Hub, or give its mmproj file with --mmproj"
    return [Finding("images", f"refused: {plan.image_refusal}", Verdict.DOUBT, remedy)]


def _states(plan: ModelPlan) -> list[Finding]:
    """Judge the memory of recurrent states; nothing if the model has none."""
    if not plan.request_state_bytes:
        return []
    text = describe_states(plan)
    if plan.num_checkpoints != 0:
        return [Finding("states", text)]
    remedy = "free some memory, or use a smaller model; otherwise each prompt is computed"
    return [Finding("states", text, Verdict.DOUBT, remedy)]


def describe_states(plan: ModelPlan, size: str = "") -> str:
    """Return a phrase about the recurrent states of a model, which has them: how many there are,
    and the size of each.

    size   the size as text; "": it is given in MiB
    """
    size = size or f"{plan.request_state_bytes / (1 << 20):.1f} MiB"
    text = f"{size} for each of {plan.max_slots:,} requests"
    if plan.has_fewer_slots:
        text += " at a time (more with --max-slots)"
    if plan.num_checkpoints is None:
        return f"{text}; no prefix cache"
    return f"{text} and {plan.num_checkpoints:,} checkpoints of the prefix cache"


def _for_longer_requests(plan: ModelPlan) -> str:
    """Return the remedy if the K/V memory limits the length of requests. If the free memory
    suffices for the model's full context, the remedy is the option that reserves enough of it."""
    needed = plan.longest_kv_bytes * 1.01
    if needed <= plan.free_bytes - (plan.device_bytes - plan.kv_bytes):
        return f"for the longest requests, set --kv-memory-gib {needed / GIB:.2f}"
    return f"no action needed; to accept this limit, set --max-len {plan.max_len}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def tokenizer(problem: str | None) -> Finding:
    """Judge whether a gateway can serve the model's tokenizer and formats.

    problem   why a gateway cannot, as in the error of `tidegate serve`; None if it can
    """
    if problem is not None:
        remedy = "fetch the model's files again, or use another model"
        return Finding("tokenizer", problem.removesuffix(f"; {remedy}"), Verdict.BAD, remedy)
    return Finding("tokenizer", "a gateway can use the model's tokenizer and formats")


def port(number: int, problem: str | None, server: int | None) -> Finding:
    """Judge whether a server can listen on an HTTP port.

    problem   why a server cannot listen on it; None if it can
    server    pid of the Tidegate server that listens on it; None if there is none
    """
    what = f"port {number}"
    if server is not None:
        return Finding(what, f"a Tidegate server runs here (pid {server}); see tidegate status")
    if problem is not None:
        return Finding(what, problem, Verdict.BAD, "choose another with --port or --host")
    return Finding(what, "free")


def sockets(directory: Path, problem: str | None) -> Finding:
    """Judge the run directory. `problem` is the reason why a server cannot put its sockets there,
    or None."""
    if problem is not None:
        remedy = "set XDG_RUNTIME_DIR to a private directory with a short path"
        return Finding("sockets", problem, Verdict.BAD, remedy)
    return Finding("sockets", f"in {directory}, which is private")


def open_files(limit: int) -> Finding:
    """Judge the limit on open files that applies to the server."""
    text = f"at most {limit:,}"
    if limit < ENOUGH_FILES:
        remedy = f"ulimit -n {ENOUGH_FILES}; each connection needs one"
        return Finding("open files", text, Verdict.DOUBT, remedy)
    return Finding("open files", text)


def cache(directory: Path, free_bytes: int | None, problem: str | None) -> Finding:
    """Judge the cache directory.

    free_bytes   free space on its disk; None if there is a `problem`
    problem      why the directory cannot be used; None if it can
    """
    if problem is not None:
        remedy = "set TIDEGATE_HOME to a writable directory"
        return Finding("cache", problem, Verdict.BAD, remedy)
    assert free_bytes is not None
    text = f"{directory}, {free_bytes / GIB:.1f} GiB free on its disk"
    if free_bytes < ENOUGH_DISK:
        remedy = "free some space, or set TIDEGATE_HOME to a directory on another disk"
        return Finding("cache", text, Verdict.DOUBT, remedy)
    return Finding("cache", text)


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict of `findings`; OK if there are none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)
