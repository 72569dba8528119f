"""The Ray actor that runs one engine on a node of the cluster, as a child process.

The actor starts `tidegate engine` and reports its address and its exit. No request, token or step
passes through it: gateways connect to the engine itself. The engine ends with the actor, which ends
with its node, its launcher, or its placement group.

Ray starts the actor's process, and imports this module in it. So Tidegate must be installed on each
node, in the same version.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping, Sequence

import ray

from protocol.wire.cluster_key import SAFE_MODE
from tools.processes.children import Child, Command, module_command

log = logging.getLogger(__name__)

CONCURRENT_CALLS = 3
"""Most calls of the actor's methods that run at once: `wait` blocks while the others are called."""


class EngineRunner:
    """Runs `tidegate engine` once. The methods are called by Ray, each in a thread of its own."""

    def __init__(self) -> None:
        self._started, self._ended = threading.Event(), threading.Event()
        #: Guards `_child`, which is None before its start and after its end.
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._drains = False
        self._exit = (0, "")
        self._failure = ""  # why the process could not be started
        self._key = -1

    def start(self, arguments: Sequence[str], key: bytes, environment: Mapping[str, str]) -> str:
        """Start the engine on a free port of this node, and return its address.

        arguments     of `tidegate engine`, without the address and the cluster key
        key           content of the file with the cluster key
        environment   variables added to that of this process

        Raises OSError if the process cannot be started.
        """
        address = _free_address(ray.util.get_node_ip_address())
        own = ["--address", address, "--cluster-key", self._key_path(key)]
        command = Command(
            "the engine",
            module_command("tools", "engine", *arguments, *own),
            environment=environment,
        )
        # The kernel ends the engine when the thread that started it ends. Ray's threads may end
        # after each call.
        threading.Thread(target=self._run, args=(command,), daemon=True).start()
        self._started.wait()
        if self._failure:
            raise OSError(self._failure)
        return address

    def wait(self) -> tuple[int, str]:
        """Wait until the engine ends. Return its exit code and the cause, as a clause."""
        self._ended.wait()
        return self._exit

    def drain(self) -> None:
        """Let the engine finish its open requests and exit."""
        with self._lock:
            self._drains = True
            if self._child is not None:
                self._child.send(signal.SIGTERM)

    def _run(self, command: Command) -> None:
        take_niceness_of_node()
        try:
            child = Child(command)
        except OSError as error:
            self._failure = str(error)
            return
        finally:
            self._started.set()
        with self._lock:
            self._child = child
            if self._drains:
                child.send(signal.SIGTERM)
        is_open = True
        while True:
            ready, _, _ = select.select([child.pidfd] + [child.output] * is_open, [], [])
            if child.output in ready:
                is_open = child.relay()
            elif child.pidfd in ready:
                break
        with self._lock:
            self._child = None
            exit = child.reap()
        self._exit = exit.code, exit.cause
        self._ended.set()

    def _key_path(self, key: bytes) -> str:
        """Return the path of a file that holds the key in memory. It exists only while this process
        does, and only this user can read it."""
        self._key = os.memfd_create("cluster.key", os.MFD_CLOEXEC)
        os.fchmod(self._key, SAFE_MODE)
        os.write(self._key, key)
        return f"/proc/{os.getpid()}/fd/{self._key}"


def take_niceness_of_node() -> None:
    """Give this thread, and the processes that it starts, the niceness of the raylet that started
    this process.

    Ray starts its workers with niceness 15. Engines would hardly compute on a node that does other
    work. Without the right to change it, it stays, and the log says how to start Ray.
    """
    own, of_node = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, os.getppid()))
    if own <= of_node:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, of_node)
    except OSError:
        log.warning(
            "the engine runs with niceness %d, because Ray starts its workers so; to change that, "
            "start Ray on this node with RAY_worker_niceness=%d in its environment",
            own,
            of_node,
        )


def _free_address(ip: str) -> str:
    """Return a ZeroMQ address on this node, with a port that is free now."""
    is_ipv6 = ":" in ip
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as trial:
        trial.bind((ip, 0))
        port = trial.getsockname()[1]
    return f"tcp://[{ip}]:{port}" if is_ipv6 else f"tcp://{ip}:{port}"
