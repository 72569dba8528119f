"""Runs real coding agents against a scripted engine, and prints what works.

    python -m tests.torture.agents [--agent codex --agent claude] [--scenario tool] [--newest]

Each agent is started with `tidegate launch`, without a terminal, in a new home and a new folder.
The chat template accepts a system message only at the start, as those of Qwen 3.5 and later do. The
versions in `tools/agents.py` are installed from npm and PyPI into --folder. With --newest the
newest ones are, and what then differs is what an update of an agent breaks. An agent that cannot be
installed is named. The command exits with 1 if there is any complaint.

| scenario | the engine | what must happen |
|---|---|---|
| plain | answers | the answer is printed |
| tool | calls the agent's shell, then answers | the output of the shell is in the next prompt |
| edit | calls the agent's tool for files | the file is there |
| parallel | calls the shell twice in one answer | both outputs are in one prompt |
| cut | fails in the middle of the first answer | the agent asks again, or names the error |
| busy | refuses the first request with 429 | the agent asks again |
| failing | refuses the first request with 500 | the agent asks again, or names the error |
| turns | calls the shell nine times, one after the other | prompts begin with those before |
| overflow | refuses the second prompt as too long | the agent shortens it, or names the error |
| resume | answers two runs of one session | the second prompt has the first answer |
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from protocol.engine.messages import Generate
from protocol.wire.errors import ContextExcess, ContextTooLong, ErrorInfo
from tests.support import agents_page
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT
from tests.support.scenarios import call
from tests.support.scripted_engine import (
    THINKING_TEMPLATE,
    Reply,
    ScriptedEngine,
    text_of,
    text_reply,
    thinking_card,
)
from tests.torture.table import print_table
from tools.agents import AGENTS

TASK = "Please do the task."
ANSWER, SECRET, MADE = "Everything is finished.", "KIWI-77", "made.txt"
GUARD = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
RESULT = "<tool>"
"""What the template writes before a result."""
MODEL, KNOWN_MODEL = "tg-model", "gpt-5.5"
CONTEXT = 1 << 19
"""Bytes are tokens here, so prompts are long."""
FOLDER = Path.home() / ".cache" / "tidegate-agents"
BLOCK_TOKENS = 16
RUN_S = 240
COLUMNS = {"agent": 20, "scenario": 10, "requests": 8, "exit": 6, "result": 0}
Json = dict[str, object]


@dataclass(frozen=True)
class AgentTools:
    """How one agent is run without a terminal, and the tools that it offers to the model.

    run       arguments of the agent for one task
    resume    arguments that continue the last run; none: it cannot
    shell     name of the tool that runs a command, and its arguments for one
    write     name of the tool that writes a file, and its arguments for MADE in a folder
    text      the answer that makes an agent without tools write MADE
    """

    run: Sequence[str]
    resume: Sequence[str] = ()
    shell: str = ""
    arguments: Callable[[str], Json] = lambda command: {}
    write: Callable[[str], tuple[str, Json]] | None = None
    text: str = ""


PATCH = f"*** Begin Patch\n*** Add File: {MADE}\n+hello\n*** End Patch\n"
_FREE = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CODEX = AgentTools(
    run=("exec", *_FREE),
    resume=("exec", "resume", "--last", *_FREE),
    shell="exec_command",
    arguments=lambda command: {"cmd": command},
    write=lambda folder: ("exec_command", {"cmd": f"echo hello > {MADE}"}),
)
VARIANTS: Mapping[str, tuple[str, str, AgentTools]] = {
    "codex": ("codex", MODEL, _CODEX),
    "codex, known model": (
        "codex",
        KNOWN_MODEL,
        AgentTools(
            run=_CODEX.run,
            resume=_CODEX.resume,
            shell="exec_command",
            arguments=_CODEX.arguments,
            write=lambda folder: ("apply_patch", {"input": PATCH}),
        ),
    ),
    "claude": (
        "claude",
        MODEL,
        AgentTools(
            run=("-p", "--dangerously-skip-permissions"),
            resume=("-c", "-p", "--dangerously-skip-permissions"),
            shell="Bash",
            arguments=lambda command: {"command": command, "description": "x"},
            write=lambda folder: (
                "Write",
                {"file_path": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "opencode": (
        "opencode",
        MODEL,
        AgentTools(
            run=("run",),
            resume=("run", "--continue"),
            shell="bash",
            arguments=lambda command: {"command": command, "description": "x"},
            write=lambda folder: (
                "write",
                {"filePath": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "qwen": (
        "qwen",
        MODEL,
        AgentTools(
            run=("--yolo", "-p"),
            resume=("--continue", "--yolo", "-p"),
            shell="run_shell_command",
            arguments=lambda command: {"command": command, "is_background": False},
            write=lambda folder: (
                "write_file",
                {"file_path": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "cline": (
        "cline",
        MODEL,
        AgentTools(
            run=(),
            shell="run_commands",
            arguments=lambda command: {"commands": [command]},
        ),
    ),
    "aider": (
        "aider",
        MODEL,
        AgentTools(
            run=("--yes-always", "--no-check-update", "--edit-format", "whole", "--message"),
            text=f"{MADE}\n```\nhello\n```\n",
        ),
    ),
}
"""Row of the table -> (agent, name of the model, its tools)."""
INSTALLED_AS = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cline": "cline",
}


# ---- scenarios


@dataclass
class AgentScript:
    """The scripted model of one run. `folder` is the agent's working directory."""

    tools: AgentTools
    folder: Path
    prompts: list[str] = field(default_factory=list)

    def __call__(self, generate: Generate) -> Reply:
        prompt = text_of(generate.prompt.tolist())
        if self.tools.shell and f'"{self.tools.shell}"' not in prompt:
            return said("A title.")  # a request besides the conversation
        self.prompts.append(prompt)
        return self.reply(prompt)

    def reply(self, prompt: str) -> Reply:
        return said(ANSWER)

    def fault(self, output: str, code: int) -> str:
        """Return what went wrong; "" if nothing did."""
        return "" if ANSWER in output else "the answer is not printed"

    @property
    def is_possible(self) -> bool:
        return True


class OneCall(AgentScript):
    COUNT = 1

    def reply(self, prompt: str) -> Reply:
        if len(self.prompts) > 1:
            return said(ANSWER)
        calls = [
            call(self.tools.shell, self.tools.arguments(f"cat {'./' * number}note.txt"))
            for number in range(self.COUNT)
        ]
        return said("".join(calls))

    def fault(self, output: str, code: int) -> str:
        if len(self.prompts) < 2:
            return "there was no second request"
        found = max(prompt.count(RESULT) for prompt in self.prompts[1:])
        if found < self.COUNT or not any(SECRET in prompt for prompt in self.prompts[1:]):
            return f"the next prompt has {found} of {self.COUNT} outputs"
        return super().fault(output, code)

    @property
    def is_possible(self) -> bool:
        return bool(self.tools.shell)


class TwoCalls(OneCall):
    COUNT = 2


class TenTurns(OneCall):
    """Nine calls, each after the output of the one before it, and an answer. `again` has for each
    turn but the first how many tokens of the prompt before it are not found again."""

    TURNS = 10

    def reply(self, prompt: str) -> Reply:
        turn = len(self.prompts)
        if turn == self.TURNS:
            return said(ANSWER)
        command = f"{'true; ' * turn}cat note.txt"
        return said(call(self.tools.shell, self.tools.arguments(command)))

    @property
    def again(self) -> list[int]:
        return [len(one) - common(one, other) for one, other in pairwise(self.prompts)]

    def fault(self, output: str, code: int) -> str:
        if len(self.prompts) != self.TURNS:
            return f"there were {len(self.prompts)} requests"
        if max(self.again) > BLOCK_TOKENS:
            return f"a prompt changes up to {max(self.again)} tokens before its end"
        return super().fault(output, code)


class FullContext(OneCall):
    """The prompt with the output is refused, because it is longer than the context."""

    def reply(self, prompt: str) -> Reply:
        if len(self.prompts) != 2:
            return super().reply(prompt)
        excess = ContextExcess(num_tokens=len(prompt), max_tokens=len(prompt) - 100)
        return ContextTooLong.of(excess, "messages").info()

    def fault(self, output: str, code: int) -> str:
        if len(self.prompts) < 2:
            return "there was no second request"
        if len(self.prompts) > 2:
            return AgentScript.fault(self, output, code)
        return "" if re.search("too long|context", output, re.I) else "the error was swallowed"


class FileEdit(AgentScript):
    def reply(self, prompt: str) -> Reply:
        if (self.folder / MADE).exists():
            return said(ANSWER)
        if self.tools.write is None:
            return said(self.tools.text)
        return said(call(*self.tools.write(str(self.folder))))

    def fault(self, output: str, code: int) -> str:
        made = self.folder / MADE
        if not made.exists() or made.read_text() != "hello\n":
            return "the file was not written"
        return "" if self.tools.text else super().fault(output, code)

    @property
    def is_possible(self) -> bool:
        return self.tools.write is not None or bool(self.tools.text)


class CutAnswer(AgentScript):
    """The first answer ends with an error."""

    def reply(self, prompt: str) -> Reply:
        if len(self.prompts) > 1:
            return said(ANSWER)
        error = ErrorInfo(code="engine_lost", message="the engine ended")
        return text_reply("hm</think>\n\nEvery", finish="error", error=error, marked=True)

    def fault(self, output: str, code: int) -> str:
        if len(self.prompts) > 1:
            return super().fault(output, code)
        return "" if code or "engine" in output else "the error was swallowed"


class BusyServer(AgentScript):
    ERROR = ErrorInfo(code="overloaded", message="the queue is full")

    def reply(self, prompt: str) -> Reply:
        return self.ERROR if len(self.prompts) == 1 else said(ANSWER)


class FailingServer(BusyServer):
    ERROR = ErrorInfo(code="engine_error", message="the engine failed")

    def fault(self, output: str, code: int) -> str:
        if len(self.prompts) > 1:
            return super().fault(output, code)
        return "" if code or "error" in output.lower() else "the error was swallowed"


class ResumedSession(AgentScript):
    def fault(self, output: str, code: int) -> str:
        if not self.prompts or ANSWER not in self.prompts[-1]:
            return "the second prompt lacks the first answer"
        return super().fault(output, code)

    @property
    def is_possible(self) -> bool:
        return bool(self.tools.resume)


SCENARIOS: Mapping[str, type[AgentScript]] = {
    "plain": AgentScript,
    "tool": OneCall,
    "edit": FileEdit,
    "parallel": TwoCalls,
    "turns": TenTurns,
    "cut": CutAnswer,
    "busy": BusyServer,
    "failing": FailingServer,
    "overflow": FullContext,
    "resume": ResumedSession,
}


def common(one: str, other: str) -> int:
    """Return how many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def said(text: str) -> Reply:
    return text_reply(f"hm</think>\n\n{text}", marked=True, size=16)


# ---- running


@dataclass(frozen=True)
class AgentRun:
    """A row of the table. `prompts` are those of its conversation."""

    variant: str
    scenario: str
    prompts: Sequence[str]
    code: int | None
    fault: str
    output: str = ""

    def cells(self) -> tuple[str, ...]:
        code = "-" if self.code is None else str(self.code)
        return self.variant, self.scenario, str(len(self.prompts)), code, self.fault or "ok"

    @property
    def word(self) -> str:
        """The result for the page."""
        return "-" if self.code is None else "no" if self.fault else "yes"

    def complaints(self, slack: float) -> list[str]:
        if not self.fault or self.code is None:
            return []
        return [f"{self.variant}, {self.scenario}: {self.fault}\n{self.output[-2000:]}"]


def install(folder: Path, name: str, *, newest: bool) -> str:
    """Install an agent into `folder`, unless it is there. Return the version; "" if that fails."""
    agent = AGENTS[name]
    if name == "aider":
        return _install_aider(folder, newest=newest)
    package = INSTALLED_AS[name]
    version = "latest" if newest else agent.tested
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    if newest or not (home / "node_modules" / ".bin" / agent.program).exists():
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(home)]
        done = subprocess.run(
            [*command, f"{package}@{version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return ""
    data = (home / "node_modules" / package / "package.json").read_text()
    found = re.search(r'"version":\s*"([^"]+)"', data)
    return found[1] if found else ""


def _install_aider(folder: Path, *, newest: bool) -> str:
    home = folder / "aider"
    pip = home / "bin" / "pip"
    if newest or not (home / "bin" / "aider").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        package = "aider-chat" if newest else f"aider-chat=={AGENTS['aider'].tested}"
        done = subprocess.run([pip, "install", "-q", package], capture_output=True, check=False)
        if done.returncode:
            return ""
    shown = subprocess.run(
        [pip, "show", "aider-chat"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"^Version: (\S+)", shown, re.MULTILINE)
    return found[1] if found else ""


class AgentRunner:
    """Runs agents against one scripted engine and gateway."""

    def __init__(self, folder: Path, engine: ScriptedEngine, gateway: GatewayProcess) -> None:
        self._folder = folder
        self._engine = engine
        self._gateway = gateway

    @property
    def log(self) -> str:
        return self._gateway.log

    def run(self, variant: str, scenario: str) -> AgentRun:
        name, model, tools = VARIANTS[variant]
        with tempfile.TemporaryDirectory(prefix=".agent-", dir=Path.home()) as place:
            work = Path(place, "work")
            work.mkdir()
            (work / "note.txt").write_text(f"the secret is {SECRET}\n")
            subprocess.run(["git", "init", "-q", str(work)], check=True)
            script = SCENARIOS[scenario](tools, work)
            if not script.is_possible:
                return AgentRun(variant, scenario, (), None, "not applicable")
            self._engine.reset()
            self._engine.script = script
            output, code = self._launch(name, model, Path(place), tools.run)
            if scenario == "resume":
                output, code = self._launch(name, model, Path(place), tools.resume)
            self._engine.script = lambda generate: said(ANSWER)
            self._engine.await_idle()
            fault = script.fault(output, code)
            return AgentRun(variant, scenario, script.prompts, code, fault, output)

    def _launch(
        self, name: str, model: str, place: Path, arguments: Sequence[str]
    ) -> tuple[str, int]:
        """Run an agent with a task. Return (what it printed, its exit code)."""
        programs = [self._folder / name / "node_modules" / ".bin", self._folder / name / "bin"]
        environment = {
            "PATH": os.pathsep.join((*map(str, programs), os.environ["PATH"])),
            "HOME": str(place),
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "IS_SANDBOX": "1",  # Claude Code then runs as root, too
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_PERMISSION": '{"*": "allow"}',
            "AIDER_ANALYTICS": "false",
        }
        command = [sys.executable, "-m", "tidegate", "launch", name, "--url", self._gateway.url]
        try:
            done = subprocess.run(
                [*command, "--model", model, "--", *arguments, TASK],
                env=environment,
                cwd=place / "work",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return f"{late.stdout!r} {late.stderr!r}", 124
        return done.stdout + done.stderr, done.returncode


@contextmanager
def agent_runner(folder: Path) -> Iterator[AgentRunner]:
    """Start an engine and a gateway for agents that are installed in `folder`."""
    card = thinking_card(chat_template=GUARD + THINKING_TEMPLATE, context_tokens=CONTEXT)
    with (
        tempfile.TemporaryDirectory() as place,
        ScriptedEngine(f"ipc://{place}/engine.sock", card=card, max_len=CONTEXT) as engine,
        GatewayProcess(engine=engine.address, served_name=[MODEL, KNOWN_MODEL]) as gateway,
    ):
        gateway.await_ready()
        yield AgentRunner(folder, engine, gateway)


def outcomes(options: argparse.Namespace) -> Iterator[AgentRun]:
    folder = Path(options.folder)
    versions = {
        name: install(folder, name, newest=options.newest)
        for name in dict.fromkeys(VARIANTS[variant][0] for variant in options.agent)
    }
    for name, version in versions.items():
        change = f", tested with {AGENTS[name].tested}" if version != AGENTS[name].tested else ""
        print(
            f"{AGENTS[name].about}: {version or 'cannot be installed'}{change if version else ''}"
        )
    with agent_runner(folder) as runner:
        for variant in options.agent:
            if versions[VARIANTS[variant][0]]:
                for scenario in options.scenario:
                    yield runner.run(variant, scenario)
        if "Traceback" in runner.log:
            yield AgentRun("the gateway", "", (), 1, "a traceback is in its log", runner.log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agent", action="append", choices=list(VARIANTS))
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--newest", action="store_true", help="install the newest versions")
    parser.add_argument("--folder", default=str(FOLDER), help=f"default: {FOLDER}")
    parser.add_argument("--page", action="store_true", help="write the results to docs/agents.md")
    options = parser.parse_args()
    if options.page and (options.agent or options.scenario or options.newest):
        parser.error("--page needs all agents and scenarios, with the tested versions")
    options.agent = options.agent or list(VARIANTS)
    options.scenario = options.scenario or list(SCENARIOS)
    if shutil.which("npm") is None:
        print("npm is missing; only agents that are installed already are run")
    runs: list[AgentRun] = []
    code = print_table(COLUMNS, _kept(outcomes(options), runs), 1.0)
    if options.page:
        agents_page.replace_part("scenarios", _scenario_table(runs))
    return code


def _kept(runs: Iterator[AgentRun], kept: list[AgentRun]) -> Iterator[AgentRun]:
    for run in runs:
        kept.append(run)
        yield run


def _scenario_table(runs: Sequence[AgentRun]) -> str:
    """Return the table in docs/agents.md. Agents that were not installed have no row."""
    found = {(run.variant, run.scenario): run for run in runs}
    rows = [
        (row_name(variant), [found[variant, name].word for name in SCENARIOS])
        for variant in VARIANTS
        if (variant, "plain") in found
    ]
    return agents_page.scenario_table(SCENARIOS, rows)


def row_name(variant: str) -> str:
    """Return the name of an agent and its version, as the page has it."""
    name, _, note = variant.partition(", ")
    agent = AGENTS[name]
    return f"{agent.about} {agent.tested}{f', {note}' if note else ''}"


if __name__ == "__main__":
    sys.exit(main())
