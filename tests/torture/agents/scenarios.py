"""The scenarios: what the scripted model answers, and how the result is checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from protocol.engine.messages import Generate
from protocol.wire.errors import ContextExcess, ContextTooLong, ErrorInfo
from tests.support.scenarios import call
from tests.support.scripted_engine import Reply, text_of, text_reply

ANSWER, SECRET, MADE = "Everything is finished.", "KIWI-77", "made.txt"
RESULT = "<tool>"
"""The marker that the template writes before a tool's result."""
BLOCK_TOKENS = 16
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
