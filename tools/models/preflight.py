"""Checks, before a server starts, whether this machine can serve a model.

Two child processes do this: a process of the worker reads the model's files, without torch, and a
process of the gateway tests the tokenizer and the output formats.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from protocol.config.gateway import GatewayConfig
from protocol.config.worker import WorkerConfig
from protocol.engine import model_card
from protocol.engine.model_card import ModelCard, SamplingDefaults
from protocol.process.exit_codes import ExitCode
from protocol.tools.start_facts import MemoryFacts, ModelPlan, Preflight
from tools.doctor_findings import describe_states
from tools.failure import Failure
from tools.models.catalogue import HubEntry, recommended_for
from tools.models.fetch import format_size
from tools.processes.child_environment import child_environment
from tools.processes.children import last_error_line, module_command, run_module
from tools.terminal import Terminal

TIMEOUT_S = 120
MODEL_CHECK_TIMEOUT_S = 300
"""This must be longer than the time after which the gateway process rejects a tokenizer."""


def preflight(workers: Sequence[WorkerConfig]) -> Preflight:
    """Return the memory plans of a server's workers, or why they cannot serve their models. Raises
    Failure if the check itself fails."""
    return msgspec.json.decode(_preflight_output(workers), type=Preflight)


def preflight_each(models: Sequence[str]) -> list[Preflight]:
    """Return, for each model path, the plan of a server with default options, or the reason why it
    cannot serve the model. Raises Failure if the check itself fails."""
    return preflight_alternatives([WorkerConfig(model=model) for model in models])


def preflight_alternatives(workers: Sequence[WorkerConfig], free_bytes: int = 0) -> list[Preflight]:
    """Return, for each worker, its plan or why it cannot serve its model, as if it were alone on
    this machine. Raises Failure if the check itself fails.

    free_bytes   memory of the device to plan with; 0: what is free now
    """
    options = ["--each", *[f"--free-bytes={free_bytes}"] * bool(free_bytes)]
    return msgspec.json.decode(_preflight_output(workers, *options), type=list[Preflight])


def _preflight_output(workers: Sequence[WorkerConfig], *options: str) -> bytes:
    configs = msgspec.json.encode(workers).decode()
    command = module_command("worker.startup.preflight", *options, configs)
    done = run_module("reading the model's files", command, timeout_s=TIMEOUT_S)
    if done.code:
        raise Failure(f"reading the model's files failed: {done.error}")
    return done.output


def check_models(workers: Sequence[WorkerConfig]) -> Preflight:
    """Return a plan for each worker, and the model card. Raises Failure, in one line with a remedy,
    if a worker cannot serve its model."""
    found = preflight(workers)
    if found.error:
        raise Failure(f"{found.error}; {found.remedy}", exit_code=ExitCode.BAD_MODEL)
    return found


def check_config(file: Path) -> None:
    """Raise Failure if a worker cannot serve the model whose header is in `file`: its config.json,
    or the start of its GGUF file.

    A process of the worker reads the file. If that process fails, the model is not refused, because
    this machine may only download it.
    """
    command = module_command("worker.startup.check_config", str(file))
    done = run_module("checking the model's header", command, timeout_s=TIMEOUT_S)
    if done.code == ExitCode.BAD_MODEL:
        raise Failure(done.error, exit_code=ExitCode.BAD_MODEL)


def check_device(device: str) -> None:
    """Raise Failure if `device`, the value of --device, was named and a worker cannot use it.

    A process of the worker checks this, because the tools do not read drivers. The other values
    need no check: the worker then uses the CPU if there is no GPU.
    """
    if device in ("auto", "cpu"):
        return
    command = module_command("worker.startup.check_device", device)
    done = run_module("checking the device", command, timeout_s=TIMEOUT_S)
    if done.code:
        raise Failure(done.error, exit_code=ExitCode.BAD_MODEL)


class ModelCheck:
    """Checks in a process of the gateway whether a gateway can serve a model.

    The process may be started before the model card is known, so that it imports its libraries
    meanwhile. It is killed at the end of the `with` block if it still runs.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def start(self) -> int:
        """Start the process, unless it was started before, and return its process id."""
        return self._started().pid

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                module_command("gateway.startup_checks", "--model"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(self._config.to_environment()),
            )
        return self._process

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def run(self, card: ModelCard) -> None:
        """Check a model. Raises Failure, in one line with a remedy, if a gateway cannot serve the
        model."""
        process = self._started()
        try:
            output, errors = process.communicate(
                msgspec.json.encode(card), timeout=MODEL_CHECK_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            message = f"checking the model's tokenizer took more than {MODEL_CHECK_TIMEOUT_S} s"
            raise Failure(message) from None
        code = process.returncode
        if code in (ExitCode.USAGE, ExitCode.BAD_MODEL):
            raise Failure(output.decode(errors="replace").strip(), exit_code=code)
        if code:
            lines = errors.decode(errors="replace").splitlines()
            reason = last_error_line(lines) or f"exit code {code}"
            raise Failure(f"checking the model's tokenizer failed: {reason}")


def without_trial(config: GatewayConfig, card: ModelCard) -> GatewayConfig:
    """Return the config of a gateway that skips the trial of the tokenizer of `card`."""
    return msgspec.structs.replace(config, tried_tokenizer=tokenizer_digest(card))


def tokenizer_digest(card: ModelCard) -> str:
    """Return the digest by which a gateway recognises a tokenizer that has passed its trial."""
    return hashlib.sha256(card.tokenizer).hexdigest()


def expecting(config: GatewayConfig, card: ModelCard, file: Path) -> GatewayConfig:
    """Return the config of a gateway that prepares the model of `card` before its engine has loaded
    it. The card is written to `file`."""
    model_card.write_card(file, model_card.CardFile(card=card, max_len=card.context_tokens))
    return msgspec.structs.replace(config, expected_card=str(file))


def limit(plan: ModelPlan) -> str | None:
    """Return a message if requests are limited to less than the model's context; otherwise None."""
    if plan.max_len < plan.context_tokens:
        return (
            f"requests are limited to {plan.max_len:,} of the model's "
            f"{plan.context_tokens:,} tokens (--max-len, --kv-memory-gib)"
        )
    return None


def memory_facts(measurements: Path) -> MemoryFacts | None:
    """Return the device's memory, and how fast it is read; None if that is not known. A process of
    the worker measures the speed at the first call, and caches it in `measurements`."""
    command = module_command("worker.startup.memory_facts", str(measurements))
    done = run_module("measuring the memory", command, timeout_s=TIMEOUT_S)
    return None if done.code else msgspec.json.decode(done.output, type=MemoryFacts)


def log_larger(
    plan: ModelPlan, terminal: Terminal, measure: Callable[[], MemoryFacts | None]
) -> None:
    """Log up to two larger models that fit into the memory of a server with the default model.

    measure   returns the facts about the memory, from which the speed of the models is estimated
    """
    larger = recommended_for(plan.free_bytes)[:2]
    if not larger:
        return
    facts = measure()
    speed = facts.read_bytes_per_s if facts else 0.0
    names = " or ".join(_offer(each, speed) for each in larger)
    estimate = "speeds are upper estimates, from the memory's bandwidth; " if speed else ""
    terminal.log(
        f"better models fit this machine: tidegate serve {names}; {estimate}see tidegate models"
    )


def _offer(entry: HubEntry, read_bytes_per_s: float) -> str:
    facts = [format_size(entry.weight_bytes)]
    if read_bytes_per_s:
        facts.append(f"at most {entry.max_tokens_per_s(read_bytes_per_s):,.2g} tokens/s")
    return f"{entry.name} ({', '.join(facts)})"


def with_recommended(card: ModelCard, worker: WorkerConfig) -> ModelCard:
    """Return the card with the sampling parameters that the catalogue recommends, as the worker
    will send it."""
    return msgspec.structs.replace(card, recommended=worker.recommended_sampling)


def log_sampling(card: ModelCard, option: str, terminal: Terminal) -> None:
    """Log that nothing recommends sampling parameters for a model that generates text, if so.

    option   --default-sampling of the model
    """
    nothing = SamplingDefaults()
    if card.generates and not option and card.defaults == card.recommended == nothing:
        terminal.log(
            f"no recommended sampling is known for {card.name}: requests without a temperature "
            "are sampled with 1 (--default-sampling)"
        )


def log_slots(
    workers: Mapping[str, WorkerConfig], plans: Mapping[str, ModelPlan], terminal: Terminal
) -> None:
    """Log which models compute fewer requests at the same time than others, because of their
    recurrent states, although the user has not set the number. The keys are names of models."""
    for name, plan in plans.items():
        if plan.has_fewer_slots and not workers[name].max_slots:
            terminal.log(f"model {name}: recurrent states of {describe_states(plan)}")


def log_limits(plans: Iterable[ModelPlan], terminal: Terminal) -> None:
    """Log how the plans limit the length of requests. Log equal messages only once."""
    for message in dict.fromkeys(limit(plan) for plan in plans):
        if message is not None:
            terminal.log(message)


def write_card(worker: WorkerConfig, file: Path) -> Path:
    """Write the card of the worker's model to `file`, and return `file`. A worker process does
    this, because only the worker reads model files. Raises Failure with the error of that process
    if it fails."""
    model, sampling = worker.model, worker.recommended_sampling
    command = module_command(
        "worker.startup.card",
        *(model, str(file), f"--max-len={worker.max_len}"),
        f"--recommended-sampling={msgspec.json.encode(sampling).decode()}",
    )
    done = run_module(f"reading {model}", command, timeout_s=TIMEOUT_S)
    if done.code:
        raise Failure(done.error or f"cannot read {model}", exit_code=ExitCode.BAD_MODEL)
    return file
