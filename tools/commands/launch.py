"""`tidegate launch AGENT`: starts a coding agent that uses a running server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from protocol.process.exit_codes import KILLED
from tools.agents import AGENTS, AgentServer, AgentSession, CodingAgent
from tools.failure import Failure
from tools.http.web import KEY_VARIABLE, WebServer, no_server
from tools.processes.discovery import add_server, server_url

DESCRIPTION = """\
Start a coding agent that uses a running server. Its settings hold for this session only. They
are arguments and environment variables of its process, so nothing is written to your own
settings. Arguments after `--` are passed to the agent.
"""

EXAMPLES = """\
examples:
  tidegate launch codex
  tidegate launch claude --model qwen3-8b
  tidegate launch codex -- exec "Explain this repository."
  tidegate launch opencode --print
"""

NOT_FOUND = 127
"""Exit code of shells for a program that is not installed."""
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
END_S = 5.0
"""Time that an agent has to end after one of END_SIGNALS."""
KEY_IN_JSON = rf'''"$(printf %s "${KEY_VARIABLE}" | sed 's/[\\"]/\\&/g')"'''
"""The key for a shell, as a string of JSON has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "agent", metavar="AGENT", choices=list(AGENTS), help=f"one of {', '.join(AGENTS)}"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model name (default: the server's first model)"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--print",
        action="store_true",
        dest="prints",
        help="print the command and its settings for a shell, and do not start the agent; the key "
        "is shown as $" + KEY_VARIABLE,
    )
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    agent = AGENTS[options.agent]
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    server = _server(WebServer(server_url(options), key), options.model, key)
    if options.prints:
        print(command_text(agent, agent.session(server), options.others, key))
        return 0
    program = shutil.which(agent.program)
    if program is None:
        raise Failure(
            f"the program {agent.program!r} is not installed; install {agent.about} with: "
            f"{agent.install}",
            exit_code=NOT_FOUND,
        )
    return _start(program, agent.session(server), options.others)


def _server(web: WebServer, name: str | None, key: str) -> AgentServer:
    """Return the server with the model `name`, or with its first one. Raises Failure."""
    models: dict[str, dict[str, Any]] = {str(entry["id"]): entry for entry in web.models()}
    if not models:
        raise no_server(web)
    name = next(iter(models)) if name is None else name
    if name not in models:
        raise Failure(f"--model {name!r}: {web.url} has {', '.join(models)}", exit_code=2)
    max_len = models[name].get("max_model_len")
    if not isinstance(max_len, int):
        raise Failure(f"{web.url} does not report the context of {name!r}; is it Tidegate?")
    return AgentServer(web.url, name, max_len, key)


def command_text(agent: CodingAgent, session: AgentSession, arguments: list[str], key: str) -> str:
    """Return the command as a shell takes it. The key is replaced by its variable."""
    words = [agent.program, *session.arguments]
    lines: list[str] = []
    if session.folder:
        lines.append("folder=$(mktemp -d)")
        for path, content in session.files.items():
            lines.append(f'mkdir -p "$folder/{os.path.dirname(path)}"')
            lines.append(f'printf %s {_quoted(content, key)} > "$folder/{path}"')
    settings = [f"{name}={_quoted(value, key)}" for name, value in session.environment.items()]
    command = [_quoted(word, key) for word in (*words, *arguments)]
    if session.folder:
        command[1:1] = [session.folder, '"$folder"']
    lines.append(" \\\n  ".join([*settings, " ".join(command)]))
    return "\n".join(lines)


def _quoted(text: str, key: str) -> str:
    """Quote `text`, which is JSON if it has a key that JSON escapes. Replace the key."""
    in_json = json.dumps(key)[1:-1]
    if in_json != key and in_json in text:
        parts, variable = text.split(in_json), KEY_IN_JSON
    elif key and key in text:
        parts, variable = text.split(key), f'"${KEY_VARIABLE}"'
    else:
        return shlex.quote(text)
    return variable.join(shlex.quote(part) if part else "" for part in parts)


def _start(program: str, session: AgentSession, arguments: list[str]) -> int:
    """Run the agent until it ends, and return its exit code."""
    environment = os.environ | session.environment
    if not session.folder:
        sys.stdout.flush()
        os.execve(program, [program, *session.arguments, *arguments], environment)
    signal.signal(signal.SIGINT, _let_the_agent_decide)
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="tidegate-agent-") as folder:
        for path, content in session.files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        own = [session.folder, folder, *session.arguments, *arguments]
        return _run([program, *own], environment)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a program until it ends, and return its exit code. If SystemExit is raised meanwhile,
    terminate the program first."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except SystemExit:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            raise


def _end(number: int, _: object) -> NoReturn:
    """Raise SystemExit, so that the folder with the key is removed. Ignore further signals."""
    for each in END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(KILLED + number)


def _let_the_agent_decide(*_: object) -> None:
    """Ignore Ctrl-C, which the terminal also sends to the agent. (A signal that is ignored with
    SIG_IGN would be ignored by the agent, too.)"""
