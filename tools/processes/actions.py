"""Events and actions of the supervisor: what happened to a process, and what to do about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.process.exit_codes import KILLED, ExitCode
from protocol.tools.control import FromSupervisor

if TYPE_CHECKING:
    from tools.processes.children import Command


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a child process."""

    child: str
    #: The exit code, or the negative number of the signal that killed it.
    code: int
    #: The cause in words; "" if it is unknown.
    reason: str = ""
    #: The server's exit code if the server ends because of this exit. If a signal killed the child,
    #: `exit_code` follows from the signal instead.
    server_code: int = ExitCode.FAILED

    @property
    def cause(self) -> str:
        how = f"exited with code {self.code}"
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        return f"{self.child} {how}" + (f": {self.reason}" if self.reason else "")

    @property
    def exit_code(self) -> int:
        return KILLED - self.code if self.code < 0 else self.server_code


@dataclass(frozen=True, slots=True)
class LogAction:
    """The action to print a log line. A failure is printed to stderr."""

    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class StartProcess:
    """The action to start `child`, and to poll until it is ready."""

    child: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """The action to send `signal` to `child`. SIGKILL also goes to all processes that the child
    started."""

    child: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class KillProcess:
    """The action to kill one process: `child` itself, or one that it started."""

    child: str
    pid: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """The action to end the supervisor with this exit code."""

    code: int
    #: The failure to print as the last line on the terminal; "" if there was none.
    cause: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SendReply:
    """The action to send a message on a connection to the control socket."""

    #: Number of the connection.
    connection: int
    message: FromSupervisor


@dataclass(frozen=True, slots=True)
class AddProcess:
    """The action to prepare for the start of one more child."""

    command: Command


@dataclass(frozen=True, slots=True)
class RemoveProcess:
    """The action to forget a child that is down."""

    child: str


@dataclass(frozen=True, slots=True)
class StartJob:
    """The action to start a process that downloads or removes a model. One runs at a time."""

    #: JSON of a `tools.processes.model_job.Order`.
    order: bytes


@dataclass(frozen=True, slots=True)
class StopJob:
    """The action to stop the process of the last `StartJob`."""


@dataclass(frozen=True, slots=True)
class SaveModels:
    """The action to store which models clients have added, for the next start of the server."""

    content: bytes


JobAction = AddProcess | RemoveProcess | StartJob | StopJob | SaveModels
Action = SendReply | LogAction | StartProcess | SendSignal | KillProcess | EndServer | JobAction


@dataclass(frozen=True, slots=True)
class StoppedProcess:
    """A process that is stopped (SIGSTOP): `child` itself, or one that it started."""

    child: str
    pid: int
    is_child: bool
