"""The groups of torch.distributed: gloo for CPUs, NCCL for GPUs. See group.py."""

from __future__ import annotations

from datetime import timedelta
from socket import AF_INET, SOCK_DGRAM, socket
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from worker.device.environment import gloo_interface
from worker.errors import PeerLost, UnusableModel
from worker.layers.group import Group

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
ADVICE = ". This is typically"
"""Start of the advice in gloo's errors, which is no help if the other rank was killed."""
TIMEOUT = timedelta(hours=1)
"""Limit of the wait for the other ranks, at the start and in each operation. It is long, because
the engine ends the ranks if one of them ends."""


class GlooGroup:
    """A group of processes that compute on CPUs. Sums are computed in float32."""

    def __init__(self, store: Store, rank: int, size: int, host: str = LOOPBACK) -> None:
        """Connect to the other ranks, which use the same store. Raises PeerLost if that fails.

        host   address of this machine at which the other ranks reach it; "": that of its name, or
               of the interface that gloo's variable names
        """
        self.rank, self.size = rank, size
        kind: Any = dist.ProcessGroupGloo  # torch does not declare its options
        options = kind._Options()
        device = kind.create_device(hostname=host) if host else kind.create_default_device()
        options._devices, options._timeout = [device], TIMEOUT
        self._processes = _connected(kind, store, rank, size, options)

    def sum(self, part: Tensor) -> Tensor:
        parts = self.gather(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total.add_(other)
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        return _gathered(self._processes, part, self.size)


class NcclGroup:
    """A group of processes with a GPU each."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Connect to the other ranks, which use the same store, with the current GPU. Raises
        PeerLost if that fails."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        self._processes = _connected(dist.ProcessGroupNCCL, store, rank, size, options)

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        _wait(self._processes.allreduce, [part])
        return part

    def gather(self, part: Tensor) -> Tensor:
        return _gathered(self._processes, part, self.size)


def join_group(address: str, rank: int, size: int, *, facts: str, device: torch.device) -> Group:
    """Connect to the other ranks, and return the group.

    address   where they meet: file://PATH on one machine, tcp://HOST:PORT of rank 0, or env:// for
              the variables of torchrun
    facts     everything about this rank that affects the bits of its results

    Raises UnusableModel if the facts of this rank differ from those of rank 0, and PeerLost if the
    others cannot be reached.
    """
    try:
        store, _, _ = next(rendezvous(address, rank, size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        store.set(f"facts of rank {rank}", facts)
        first = store.get("facts of rank 0").decode()
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"cannot meet the other ranks at {address}: {error}") from error
    if first != facts:
        raise UnusableModel(
            f"all ranks must compute alike: rank 0 has {first}; rank {rank} has {facts}",
            remedy="use equal machines and libraries, and the same --threads",
        )
    if device.type != "cpu":
        return NcclGroup(store, rank, size)
    return GlooGroup(store, rank, size, "" if gloo_interface() else own_host(address))


def own_host(address: str) -> str:
    """Return the address of this machine at which the ranks that meet at `address` reach it; "" if
    it is not known."""
    if address.startswith("file:"):
        return LOOPBACK
    host = urlsplit(address).hostname
    if host is None or host in ("localhost", LOOPBACK):  # other machines know another address
        return ""
    with socket(AF_INET, SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _connected(kind: Any, *arguments: Any) -> Any:
    try:
        return kind(*arguments)
    except RuntimeError as error:
        raise PeerLost(f"cannot connect to the other ranks: {error}") from error


def _gathered(processes: Any, part: Tensor, size: int) -> Tensor:
    part = part.contiguous()
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]))
    _wait(processes._allgather_base, whole, part)
    return whole.view(size, *part.shape)


def _wait(start: Any, *tensors: Any) -> None:
    """Start an operation of torch's process group, and wait for it: on a GPU, in the stream only.
    Raises PeerLost if it fails."""
    try:
        start(*tensors).wait()
    except RuntimeError as error:
        cause = str(error).partition(ADVICE)[0]
        raise PeerLost(f"lost the connection to another rank: {cause}") from error
