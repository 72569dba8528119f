"""The connection to a Ray cluster, and what the cluster reports of its nodes."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.exceptions import RayError

from protocol.process.exit_codes import ExitCode
from tools.cluster.resources import ClusterNode, Resources
from tools.failure import Failure

CONNECT_TIMEOUT_S = 5.0


def connect(address: str) -> None:
    """Connect to the Ray cluster at `address`, or to that of this host if it is "auto". Raises
    Failure if there is none.

    Ray may try for a minute, in which it runs no signal handler of Python, and it replaces that of
    SIGTERM. It does neither in a thread.
    """
    if address != "auto":
        check_address(address)
    with ThreadPoolExecutor(1, "connect") as pool:
        connected = pool.submit(ray.init, address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            connected.result()
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise Failure(f"--cluster {address}: {first_line(error)}") from None


def check_address(address: str) -> None:
    """Raise Failure if nothing listens at HOST:PORT. Ray itself would try for a long time."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return
    except ValueError:
        cause = 'must be "auto" or HOST:PORT, the address of the cluster\'s head node'
    except OSError as error:
        cause = f"no Ray cluster answers: {error.strerror or error}"
        raise Failure(f"--cluster {address}: {cause}") from None
    raise Failure(f"--cluster {address}: {cause}", exit_code=ExitCode.USAGE)


def living_nodes() -> list[ClusterNode]:
    """Return the nodes of the cluster that are alive as far as Ray knows."""
    return [
        ClusterNode(node["NodeID"], node["NodeManagerAddress"], dict(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_resources() -> Resources:
    """Return the resources of the whole cluster that are not in use."""
    return {name: float(amount) for name, amount in ray.available_resources().items()}


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
