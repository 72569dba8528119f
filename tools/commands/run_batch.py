"""`tidegate run-batch`: answers the lines of a file with a running server, or one of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from tools.batches.config import BatchRunConfig
from tools.batches.input import BatchInput, InputFacts
from tools.batches.output import BatchOutput
from tools.batches.progress import RunProgress, duration
from tools.batches.run import BatchRun
from tools.failure import Failure
from tools.flags import add_flags, build, to_arguments
from tools.http.web import KEY_VARIABLE, WebServer, no_server
from tools.option_groups import add_grouped_flags
from tools.processes.discovery import add_server, server_url
from tools.processes.private_server import PrivateServer

DESCRIPTION = """\
Answer each line of INPUT, in OpenAI's batch format, and append the results to OUTPUT. If the run is
interrupted, even killed, the same command continues it, and each line is answered exactly once.
Lines may be answered in any order. The exit code is 1 if lines have failed.
"""

EXAMPLES = """\
examples:
  tidegate run-batch in.jsonl out.jsonl                        with your server on this machine
  tidegate run-batch in.jsonl out.jsonl --url http://HOST:8000 --concurrency 64
  tidegate run-batch in.jsonl out.jsonl --model qwen3-0.6b     starts a server for the run

a line of INPUT, and one of OUTPUT:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": "batch_req_...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...",
   "body": {...}}, "error": null}
"""

USUAL_CONCURRENCY = 16
"""Number of lines to send at the same time if the server does not list its number of slots."""
MAX_USUAL_CONCURRENCY = 256
FAILED_EXIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", type=Path, help="file with a request per line")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="file for the results")
    add_server(parser)
    parser.add_argument("--api-key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="start a server with this model for the run (MODEL as for `tidegate serve`); it "
        "answers under every model name in the lines",
    )
    add_flags(parser, BatchRunConfig, title="the run")
    add_grouped_flags(parser, [EngineConfig, WorkerConfig])


def run(options: argparse.Namespace) -> int:
    """Answer the lines that have no result yet. Return 1 if a line of the output has failed, else
    0. Raises Failure if nothing can be sent, or if the run cannot continue."""
    try:
        config = build(BatchRunConfig, vars(options))
        serve_arguments = _serve_arguments(vars(options))
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    _check_server_options(options, serve_arguments)
    with BatchInput(options.input) as source, BatchOutput(options.output) as output:
        facts = source.check()
        done = output.resume(facts)
        num_before, started_at = len(done), time.monotonic()
        if num_before < facts.num_lines:
            with contextlib.ExitStack() as stack:
                server = _server(options, facts, serve_arguments, stack)
                concurrency = config.concurrency or _concurrency(server)
                if num_before:
                    print(f"continuing after {num_before:,} lines", file=sys.stderr)
                progress = stack.enter_context(
                    RunProgress(facts.num_lines, num_before, output.num_failed, started_at)
                )
                batch_run = BatchRun(
                    server,
                    source.lines(done),
                    output.append,
                    progress.on_result,
                    timeout_s=config.timeout_s,
                    give_up_s=config.give_up_s,
                )
                batch_run.run(min(concurrency, facts.num_lines - num_before))
        elapsed = duration(time.monotonic() - started_at)
        num_now = output.num_done - num_before
        print(
            f"{output.num_done:,} lines have results, {output.num_failed:,} of them failed; "
            f"{num_now:,} answered in {elapsed}; {options.output}"
        )
    return FAILED_EXIT if output.num_failed else 0


def _serve_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options of the engine and the worker for `tidegate serve`. Raises ValueError for
    options that contradict each other."""
    # `serve` sets the model and the addresses; only the other options are passed on.
    worker = build(WorkerConfig, options, model="", address="")
    engine = build(EngineConfig, options, worker=worker, address="")
    return [*to_arguments(engine), *to_arguments(worker)]


def _check_server_options(options: argparse.Namespace, serve_arguments: Sequence[str]) -> None:
    if options.model and (options.url or options.port):
        raise Failure("give only one of --model, --url and --port", exit_code=2)
    if serve_arguments and not options.model:
        name = serve_arguments[0].partition("=")[0]
        raise Failure(f"{name} needs --model, which starts a server", exit_code=2)


def _server(
    options: argparse.Namespace,
    facts: InputFacts,
    serve_arguments: Sequence[str],
    stack: contextlib.ExitStack,
) -> WebServer:
    """Return a client of the server to use. A server of --model runs until `stack` is closed."""
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    if not options.model:
        server = WebServer(server_url(options), key)
        # A server whose engine restarts is waited for; one that is not there is probably a mistake.
        if not server.models() and server.get("/livez") is None:
            raise no_server(server)
        return server
    names = [f"--served-name={name}" for name in facts.models]
    arguments = ["--restart", "--no-log-requests", *names, *serve_arguments]
    print(f"starting a server for {options.model}", file=sys.stderr, flush=True)
    return stack.enter_context(PrivateServer(options.model, arguments)).web


def _concurrency(server: WebServer) -> int:
    """Return the number of requests that the server's models compute at the same time."""
    slots = [entry.get("max_slots") for entry in server.models()]
    known = [number for number in slots if isinstance(number, int) and number > 0]
    return min(MAX_USUAL_CONCURRENCY, max(known, default=USUAL_CONCURRENCY))
