"""`tidegate bench`: measures the latency and throughput of one or more servers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tqdm import tqdm

from tools.bench import datasets
from tools.bench.answers import BenchAnswer
from tools.bench.client import OPTIONAL, BenchClient, StampedLoop, accepted_fields
from tools.bench.config import BenchConfig, BenchLoad, run_order
from tools.bench.load import body_of, run_load
from tools.bench.page import page
from tools.bench.report import aligned, ratios, table, warnings
from tools.bench.stats import BenchRun, Summary, summarize
from tools.failure import Failure
from tools.flags import add_flags, build
from tools.http.web import KEY_VARIABLE, WebServer, no_server
from tools.paths import user_path
from tools.processes.discovery import add_server, server_url

DESCRIPTION = """\
Measure the latency and throughput of a server under load. Works with any server that speaks the
OpenAI API.
"""

EXAMPLES = """\
examples:
  tidegate bench --concurrency 1,8,32 --html curve.html     latency against throughput
  tidegate bench --rate 2,4 --slo-ttft-ms 500               random arrivals, with goodput
  tidegate bench --dataset shared-prefix --warm-up 0        the effect of the prefix cache
  tidegate bench --api chat --dataset file --file prompts.jsonl
  tidegate bench --vs http://127.0.0.1:8001                 compare two servers
  tidegate bench step MODEL                                 one step of the worker, without a server
"""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SEEDS = 1 << 32
ERRORS_EXIT = 1


@dataclass(slots=True)
class BenchTarget:
    """A server to measure."""

    url: str
    model: str
    client: BenchClient
    #: Fields of `OPTIONAL` that the server accepts.
    accepted: frozenset[str] = frozenset()
    #: For each load, its runs on this server.
    runs: list[list[BenchRun]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "server",
        nargs="?",
        metavar="URL|PORT",
        help="the same as --url URL, or as --port PORT if it is a number",
    )
    add_server(parser)
    add_flags(parser, BenchConfig, title="the benchmark")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and print the results. Return 1 if a request failed, else 0. Raises Failure
    if an option is wrong, or if a server cannot be measured."""
    try:
        if options.server and (options.url or options.port):
            raise Failure("give only one of URL, PORT, --url and --port", exit_code=2)
        if options.server and options.server.isdecimal():
            options.port = int(options.server)
        else:
            options.url = options.url or options.server
        config = build(BenchConfig, vars(options), url=server_url(options))
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    seed = config.seed or random.SystemRandom().randrange(1, SEEDS)
    with asyncio.Runner(loop_factory=StampedLoop) as runner:
        targets = runner.run(_measure(config, seed))
    servers = [
        [
            summarize(target.url, load, runs, config)
            for load, runs in zip(config.loads, target.runs, strict=True)
        ]
        for target in targets
    ]
    _report(config, seed, targets, servers)
    return ERRORS_EXIT if any(s.errors for summaries in servers for s in summaries) else 0


async def _measure(config: BenchConfig, seed: int) -> list[BenchTarget]:
    key = os.environ.get(KEY_VARIABLE, "")
    own = _target(config, config.url, key)
    others = [_target(config, url, "") for url in config.vs]  # the API key is not sent to them
    targets = [own, *others]
    try:
        await _measure_all(targets, config, seed)
    finally:
        for target in targets:
            target.client.close()
        await asyncio.sleep(0)  # lets the loop close the connections
    return targets


async def _measure_all(targets: list[BenchTarget], config: BenchConfig, seed: int) -> None:
    probe = datasets.probe(config, seed)
    for target in targets:
        everything = body_of(probe, config, target.model, frozenset(OPTIONAL))
        target.accepted = await accepted_fields(target.client, everything)
        target.runs = [[] for _ in config.loads]
    for round_number, load_number, order in run_order(config):
        load = config.loads[load_number]
        run_number = round_number * len(config.loads) + load_number
        for server in order:
            target = targets[server]
            bodies = (
                body_of(prompt, config, target.model, target.accepted)
                for prompt in datasets.prompts(config, seed, run_number)
            )
            with _progress_bar(config, load, target.url) as on_answer:
                done = await run_load(target.client, bodies, load, config, seed, on_answer)
            target.runs[load_number].append(done)


def _target(config: BenchConfig, url: str, key: str) -> BenchTarget:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StampedLoop)
    headers = dict(_header(line) for line in config.header)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    server = WebServer(url, headers.get("Authorization", "").removeprefix("Bearer "))
    model = config.model or server.first_model()
    if model is None:
        raise no_server(server)
    client = BenchClient(
        server.url, PATHS[config.api], headers, loop.clock, wait_s=config.timeout_s
    )
    return BenchTarget(server.url, model, client)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


@contextlib.contextmanager
def _progress_bar(config: BenchConfig, load: BenchLoad, url: str) -> Iterator[Any]:
    """Show a progress bar inside the `with` block, if stderr is a terminal. Yield the function to
    call with each answer."""
    with tqdm(
        desc=f"{url}, {load}",
        total=config.num_requests(load),
        unit="req",
        leave=False,
        disable=None,
    ) as bar:
        failed = itertools.count(1)

        def on_answer(answer: BenchAnswer) -> None:
            if answer.error:
                bar.set_postfix(errors=next(failed), refresh=False)
            bar.update()

        yield on_answer


# ---- output


def _report(
    config: BenchConfig, seed: int, targets: list[BenchTarget], servers: list[list[Summary]]
) -> None:
    print(facts(config, seed))
    for target, summaries in zip(targets, servers, strict=True):
        print(f"\n{target.url}  {target.model}\n\n{aligned(table(summaries))}")
    for other in servers[1:]:
        print(
            f"\n{servers[0][0].server} : {other[0].server}\n\n{aligned(ratios(servers[0], other))}"
        )
    unsupported = [
        f"{target.url} does not support ignore_eos, so its answers may be short"
        for target in targets
        if "ignore_eos" not in target.accepted
    ]
    lines = [line for summaries in servers for summary in summaries for line in warnings(summary)]
    if lines or unsupported:
        print("\n" + "\n".join([*unsupported, *lines]), file=sys.stderr)
    if config.json:
        described = {"config": msgspec.to_builtins(config), "seed": seed}
        figures = [msgspec.to_builtins(summaries) for summaries in servers]
        _write(config.json, json.dumps({**described, "servers": figures}, indent=1) + "\n")
    if config.html:
        _write(config.html, page("Latency against throughput", facts(config, seed), servers))


def facts(config: BenchConfig, seed: int) -> str:
    """Return a line that describes the requests of the benchmark."""
    prompts = {
        "random": f"random prompts of {config.input_tokens} tokens",
        "shared-prefix": f"prompts of {config.prefix_tokens} shared and {config.input_tokens} "
        "random tokens",
        "file": f"prompts of {config.file}",
    }[config.dataset]
    if config.dataset != "file" and not config.sends_ids:
        prompts = prompts.replace("tokens", "words")
    spread = f" (both vary by {config.spread:.0%})" if config.spread else ""
    objectives = [
        f"{name} {value:g} ms"
        for name, value in (("TTFT", config.slo_ttft_ms), ("TPOT", config.slo_tpot_ms))
        if value
    ]
    suffix = f"; objectives: {', '.join(objectives)}" if objectives else ""
    return (
        f"{config.api}, {prompts}, answers of {config.output_tokens} tokens{spread}; "
        f"seed {seed}{suffix}"
    )


def _write(name: str, text: str) -> None:
    try:
        user_path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {name}: {error}") from None
