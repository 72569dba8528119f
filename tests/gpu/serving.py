"""Measures a whole server, with a random model of Qwen3-8B's shape on the local disk: gateway,
engine and worker, under a load of `tidegate bench`."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.config.worker import WorkerConfig
from protocol.tools.bench import StepBench, StepTiming
from tests.gpu.checkpoints import weight_bytes, write_checkpoint
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, checked, figure
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.waiting import eventually
from tools.commands.bench_step import measure
from tools.processes.children import module_command
from worker.loading.header import ModelHeader, read_header

STREAMS, PROMPT, ANSWER, WAVES = 256, 512, 256, 2
"""Streams, tokens of each prompt and answer, and requests that each stream sends."""
STEP_TOKENS = 8192
SHARE = 0.85
RATE, RATE_S, FIRST_TOKEN_MS = 16, 15, 60.0
START_S, STOP_S = 150.0, 20.0
RESULT = "serving.json"


def measure_serving(session: GpuSession) -> Iterator[GpuRow]:
    model = _write_model(session)
    streams, prompt, answer = session.choose((STREAMS, PROMPT, ANSWER), (3, 16, 8))
    offline_s = _offline_s(session, model, streams, prompt, answer)
    with _server(session, model) as url:
        requests = streams * WAVES
        load = ("--concurrency", str(streams), "--requests", str(requests))
        found = _bench(session, url, "full", *load, prompt=prompt, answer=answer)
        yield _complete("all requests under full load", found)
        rate = found["output_tokens_per_s"]
        (session.folder / RESULT).write_text(json.dumps({"output_tokens_per_s": rate}))
        name = f"{streams} streams of {prompt} + {answer} tokens"
        ttft = f"first token p50 {found['ttft_ms']['p50']:,.0f} ms"
        yield figure(name, rate, "tokens/s", text=ttft)
        share = 100 * rate / (streams * answer / offline_s)
        yield figure("of the rate of its steps alone", share, "%", at_least=100 * SHARE)
        load = ("--rate", str(RATE), "--duration-s", str(session.choose(RATE_S, 1)))
        found = _bench(session, url, "rate", *load, prompt=prompt, answer=answer // 4)
        yield _complete(f"all requests at {RATE} a second", found)
        name = f"first token p50, {RATE} requests/s of {prompt} tokens"
        text = f"p99 {found['ttft_ms']['p99']:,.3g} ms"
        yield figure(name, found["ttft_ms"]["p50"], "ms", at_most=FIRST_TOKEN_MS, text=text)


def _write_model(session: GpuSession) -> Path:
    """Write the model to the session's folder. Raises NotPossible if the disk is too small."""
    config = session.config("qwen3-8b")
    header = read_header(config)
    assert isinstance(header, ModelHeader)
    session.models.mkdir(exist_ok=True)
    needed, free = weight_bytes(header), shutil.disk_usage(session.models).free
    if free < 1.1 * needed:
        raise NotPossible(f"the model takes {needed >> 30} GiB, and the disk has {free >> 30} free")
    return write_checkpoint(config, session.models / "served", session.device)


def _offline_s(session: GpuSession, model: Path, streams: int, prompt: int, answer: int) -> float:
    """Return the seconds that the worker's steps alone take for one request of each stream: the
    prompts in full steps, and the answers in steps of all streams."""
    together = max(1, min(STEP_TOKENS // prompt, streams))
    prompts_s = _step_s(session, model, batch=together, context=0, new_tokens=prompt)
    answers_s = _step_s(session, model, batch=streams, context=prompt + answer // 2)
    return streams / together * prompts_s + answer * answers_s


def _step_s(
    session: GpuSession, model: Path, *, batch: int, context: int, new_tokens: int = 1
) -> float:
    worker = WorkerConfig(
        model=str(model),
        device=session.choose("cuda:0", "cpu"),
        dtype=session.choose("bfloat16", "float32"),
        threads=session.threads,
        token_budget=batch * new_tokens,
        decode_graphs="auto" if new_tokens == 1 else "off",
    )
    steps = StepBench(
        worker=worker, batch=(batch,), context=(context,), new_tokens=new_tokens, steps=10
    )
    (timing,) = (line for line in measure(steps) if isinstance(line, StepTiming))
    return timing.step_s


@contextmanager
def _server(session: GpuSession, model: Path) -> Iterator[str]:
    """Serve the model inside the `with` block, and yield the server's URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = _tidegate(
        *("serve", str(model), "--port", str(port), "--max-len", session.choose("1024", "128")),
        *("--device", session.choose("cuda:0", "cpu")),
        *("--dtype", session.choose("bfloat16", "float32")),
        *("--threads", str(session.threads)),
    )
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as server:
        try:
            _wait_until_ready(server, url)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    def is_ready() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}; see the log")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # it does not listen yet, or is not ready
            return False

    if not eventually(is_ready, within_s=START_S, every_s=0.2):
        raise RuntimeError(f"the server was not ready after {START_S:.0f} s; see the log")


def _bench(
    session: GpuSession, url: str, name: str, *load: str, prompt: int, answer: int
) -> dict[str, Any]:
    """Return the figures of one load, as `tidegate bench` writes them."""
    file = session.folder / f"serving-{name}.json"
    command = _tidegate(
        *("bench", url, *load, "--json", str(file), "--input-tokens", str(prompt)),
        *("--output-tokens", str(answer), "--vocabulary", session.choose("20000", "90")),
    )
    subprocess.run(command, cwd=ROOT)  # errors are in the figures
    ((figures,),) = json.loads(file.read_text())["servers"]
    return dict(figures)


def _complete(name: str, figures: dict[str, Any]) -> GpuRow:
    """Return whether all requests had whole answers."""
    total, wrong = figures["requests"], figures["requests"] - figures["completed"]
    text = f"{total - wrong} of {total} complete, {figures['short_answers']} short"
    return checked(name, text, is_right=wrong == 0 and figures["short_answers"] == 0)


def _tidegate(*arguments: str) -> list[str]:
    return module_command("tools", *arguments)
