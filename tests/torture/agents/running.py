"""Runs agents against a scripted engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT
from tests.support.scripted_engine import THINKING_TEMPLATE, ScriptedEngine, thinking_card
from tests.torture.agents.scenarios import ANSWER, SCENARIOS, SECRET, said
from tests.torture.agents.variants import KNOWN_MODEL, MODEL, VARIANTS, AgentVariant

TASK = "Please do the task."
GUARD = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
CONTEXT = 1 << 19
"""Bytes are tokens here, so prompts are long."""
FOLDER = Path.home() / ".cache" / "tidegate-agents"
RUN_S = 240


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
        row = VARIANTS[variant]
        tools = row.tools
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
            output, code = self._start(row, Path(place), tools.run)
            if scenario == "resume":
                output, code = self._start(row, Path(place), tools.resume)
            self._engine.script = lambda generate: said(ANSWER)
            self._engine.await_idle()
            fault = script.fault(output, code)
            return AgentRun(variant, scenario, script.prompts, code, fault, output)

    def _start(self, row: AgentVariant, place: Path, arguments: Sequence[str]) -> tuple[str, int]:
        """Run an agent with a task. Return (what it printed, its exit code)."""
        home = self._folder / row.agent
        programs = [home / "node_modules" / ".bin", home / "bin"]
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
            "SERVER_URL": self._gateway.url,
        }
        launch = [sys.executable, "-m", "tidegate", "launch", row.agent, "--url", self._gateway.url]
        command = [*launch, "--model", row.model, "--"]
        if row.command:
            program, script, *words = row.command
            command = [program, str(self._folder / script), *words]
        try:
            done = subprocess.run(
                [*command, *arguments, TASK],
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
        GatewayProcess(
            engine=engine.address,
            served_name=[MODEL, KNOWN_MODEL],
            response_store=f"{place}/responses.db",
        ) as gateway,
    ):
        gateway.await_ready()
        yield AgentRunner(folder, engine, gateway)
