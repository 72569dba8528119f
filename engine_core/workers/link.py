"""The connection to the workers of one engine: starts them, sends plans, receives results, and
detects their end.

Usually there is one worker. With tensor parallelism there are several, the ranks of a group. All of
them get each message, in the same order, and rank 0 answers. The group lives and dies as one: if a
rank ends, the others may wait for it forever, so they are killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine_core.workers.group import TokenAgreement, joint_ready
from engine_core.workers.process import WorkerLost, WorkerProcess, name_of
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.errors import WireError
from protocol.worker.kv import KVReport
from protocol.worker.steps import (
    AdapterReport,
    EncodeResult,
    FromWorker,
    Heartbeat,
    ImageEncoded,
    JoinRefused,
    RankDigest,
    StepResult,
    Stop,
    TokenizerRead,
    ToWorker,
    Traced,
    WorkerFailed,
    WorkerJoins,
    WorkerReady,
    WorkerSettings,
)

log = logging.getLogger(__name__)

STOP_WAIT_S = 5.0
BROKEN_WAIT_S = 0.5
"""How long the other ranks may take to stop if one is lost. They may wait for it in vain."""
ROOT_CAUSE_S = 1.0
"""How long to wait for the cause if a rank has failed because it has lost another one."""
POLL_MS = 50
MAX_FOREIGN_PER_TURN = 100
FromGroup = (
    StepResult
    | EncodeResult
    | ImageEncoded
    | KVReport
    | AdapterReport
    | Traced
    | TokenizerRead
    | WorkerReady
)


class WorkerLink:
    """The workers of one engine, and the socket that they connect to.

    The engine's loop polls `socket` for messages, and `death`, a descriptor that becomes readable
    when a worker process ends. A peer joins the group by its first message. A worker of this
    machine joins with its first report (TokenizerRead, WorkerReady or WorkerFailed), a worker of
    another machine with WorkerJoins. Messages of all other peers are dropped and counted in
    `num_foreign_messages`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: EngineConfig,
        address: str,
        key: ClusterKey | None = None,
    ) -> None:
        """Start the workers of this machine.

        address   ipc address for them
        key       cluster key that workers of other machines must have
        """
        self.address = address
        self.socket = sockets.bind_router(context, address)
        if config.worker_address:
            sockets.also_bind(context, self.socket, config.worker_address, key)
        self._config = config
        self._size = config.tensor_parallel
        self._decoder: codec.Decoder[FromWorker] = codec.Decoder(FromWorker)
        self.num_foreign_messages = 0
        #: Identity of a peer -> its rank, and the reverse.
        self._ranks: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        self._ready: dict[int, WorkerReady] = {}
        self._agreement = TokenAgreement(self._size)
        #: Whether a worker was lost. The others need not be asked to stop then.
        self._is_broken = False
        self._meeting_file, self._rendezvous = _meeting_place(config, address)
        local = self._rendezvous
        if config.worker_address:
            local = sockets.local_address(local)
        self._processes = [
            WorkerProcess(msgspec.structs.replace(each, address=address, rendezvous=local))
            for each in config.local_workers
        ]
        self._deaths = select.epoll()
        for process in self._processes:
            self._deaths.register(process.death, select.EPOLLIN)
        self.death = self._deaths.fileno()
        if config.workers_elsewhere:
            log.info(
                "waiting for %d of %d workers at %s",
                *(config.workers_elsewhere, self._size, config.worker_address),
            )

    @property
    def pid(self) -> int:
        """Process id of rank 0; 0 if it is on another machine."""
        return self._processes[0].pid if self._processes else 0

    @property
    def stopped_pid(self) -> int | None:
        """Process id of a worker of this machine that has been stopped (SIGSTOP); None if none
        has."""
        return next((each.pid for each in self._processes if each.is_stopped), None)

    def send(self, message: ToWorker) -> None:
        """Send a message to all workers. Workers that have disconnected do not get it, and no error
        is raised: `death` and `check_connections` detect their loss."""
        assert self._identities, "no worker has sent a message"
        frames = codec.encode(message)
        for identity in self._identities.values():
            self._send_to(identity, frames)

    def check_connections(self) -> None:
        """Raise WorkerLost if a worker of another machine has disconnected. Call this method a few
        times a second."""
        frames = codec.encode(Heartbeat())
        for rank, identity in self._identities.items():
            if rank >= len(self._processes) and not self._send_to(identity, frames):
                self._is_broken = True
                raise WorkerLost(f"{self._name(rank)}: the connection to its machine was lost")

    def receive(self) -> FromGroup | None:
        """Return the next message for the engine, or None if there is none now. The group's
        WorkerReady is returned once all its workers are ready.

        Raises WorkerLost if a worker reports its failure, or if a message cannot be decoded,
        because later messages could not be trusted either.
        """
        for _ in range(MAX_FOREIGN_PER_TURN):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = self._read(identity, frames)
            if message is not None and (found := self._pass_on(identity, message)) is not None:
                return found
        return None

    def _read(self, identity: bytes, frames: list[bytes]) -> FromWorker | None:
        """Decode a message, and add its sender to the group if this is a worker's first message.
        Return None if the sender does not belong to the group. Raises WorkerLost if a worker's
        message is malformed."""
        rank = self._ranks.get(identity)
        try:
            message = self._decoder.decode(frames)
        except WireError as error:
            if rank is not None:
                self._is_broken = True
                name = self._name(rank)
                raise WorkerLost(f"{name} sent a malformed message: {error.message}") from None
            self.num_foreign_messages += 1
            return None
        if rank is None and not self._admit(identity, message):
            self.num_foreign_messages += 1
            return None
        return message

    def _admit(self, identity: bytes, message: FromWorker) -> bool:
        """Add a peer to the group if its first message is one that a worker sends first. Return
        whether the peer was added. A worker of another machine receives its settings or a
        refusal."""
        match message:
            case WorkerJoins(rank=wanted):
                return self._admit_elsewhere(identity, wanted)
            case TokenizerRead():
                rank = 0
            case WorkerReady(rank=rank) | WorkerFailed(rank=rank):
                pass
            case _:
                return False
        if not 0 <= rank < len(self._processes) or rank in self._identities:
            return False
        self._add(identity, rank)
        return True

    def _admit_elsewhere(self, identity: bytes, wanted: int) -> bool:
        ranks = range(len(self._processes), self._size)
        free = [rank for rank in ranks if rank not in self._identities]
        rank = wanted if wanted >= 0 else next(iter(free), -1)
        if rank not in free:
            places = f"{ranks.start} to {ranks.stop - 1}" if ranks else "none"
            error = f"rank {wanted} is taken, or not among its ranks for other machines: {places}"
            self._send_to(identity, codec.encode(JoinRefused(error=error)))
            return False
        self._add(identity, rank)
        settings = msgspec.json.encode(self._settings(rank))
        self._send_to(identity, codec.encode(WorkerSettings(config=settings)))
        log.info("rank %d of %d has joined", rank, self._size)
        return True

    def _add(self, identity: bytes, rank: int) -> None:
        self._ranks[identity], self._identities[rank] = rank, identity

    def _settings(self, rank: int) -> WorkerConfig:
        """Return the config of a worker on another machine, without the directories of this one."""
        worker = self._config.worker
        return msgspec.structs.replace(
            worker,
            model=Path(worker.model).name,
            draft_model=Path(worker.draft_model).name,
            libraries="",
            measurements="",
            cluster_key="",
            address="",
            rank=rank,
            local_size=1,
            rendezvous=self._rendezvous,
        )

    def _pass_on(self, identity: bytes, message: FromWorker) -> FromGroup | None:
        """Return the message that the engine receives because a worker sent `message`; None if the
        engine receives nothing."""
        rank = self._ranks[identity]
        match message:
            case WorkerFailed():
                self._is_broken = True
                raise self._failure(rank, message)
            case WorkerJoins():
                return None
            case WorkerReady():
                self._ready[rank] = message
                return joint_ready(self._ready) if len(self._ready) == self._size else None
            case RankDigest() if rank > 0:
                self._agreement.on_digest(rank, message)
                return None
            case StepResult() if rank == 0:
                if self._size > 1:
                    self._agreement.on_result(message)
                return message
            case (
                EncodeResult()
                | ImageEncoded()
                | TokenizerRead()
                | KVReport()
                | AdapterReport()
                | Traced()
            ) if rank == 0:
                return message
            case _:
                return None

    def exit_error(self) -> WorkerLost:
        """Wait for a process to end, and return an error that describes how it ended."""
        self._is_broken = True
        if self._size > 1:
            try:
                while self.receive() is not None:
                    pass
            except WorkerLost as error:
                return error  # a last message is more precise than an exit code
            if cause := self._ended({}):
                return cause.exit_error()
        return self._processes[0].exit_error()

    def _failure(self, rank: int, failed: WorkerFailed) -> WorkerLost:
        """Return the error for the failure of a worker. If the worker failed only because it lost
        another rank, wait up to ROOT_CAUSE_S for that rank's error, and return it instead."""
        victims = {rank: failed}
        end = time.monotonic() + ROOT_CAUSE_S
        while failed.is_consequence and len(victims) < self._size and time.monotonic() < end:
            try:
                self.check_connections()
            except WorkerLost as error:
                return error
            cause = self._ended(victims)
            # A process that has ended may have sent its cause before.
            has_message = self.socket.poll(POLL_MS)
            if not has_message:
                if cause is not None:
                    return cause.exit_error()
                continue
            identity, *frames = self.socket.recv_multipart()
            message = self._read(identity, frames)
            if isinstance(message, WorkerFailed):
                rank, failed = self._ranks[identity], message
                victims[rank] = message
        name = "" if self._size == 1 else f"{self._name(rank)}: "
        return WorkerLost(name + failed.message, failed.exit_code)

    def _ended(self, victims: dict[int, WorkerFailed]) -> WorkerProcess | None:
        """Return a worker process that has ended without reporting a failure; None if there is
        none. Prefer one that was killed. `victims` are the failures that were reported, by rank."""
        ended = [each for each in self._processes if each.has_ended and each.rank not in victims]
        return max(ended, key=lambda process: process.was_killed, default=None)

    def stop(self) -> None:
        """Stop the workers with a Stop message or SIGTERM, then with SIGKILL after STOP_WAIT_S, or
        after BROKEN_WAIT_S if one of several was lost. SIGTERM is sent to a process that still
        loads the model, because it reads no messages. May be called twice."""
        if self.socket.closed:
            return
        for rank, identity in self._identities.items():
            if rank in self._ready:
                self._send_to(identity, codec.encode(Stop()))
        for process in self._processes:
            if process.rank not in self._ready:
                process.terminate()
            if process.is_stopped:  # a stopped process reacts to SIGKILL only
                process.kill()
        is_hopeless = self._is_broken and self._size > 1
        end = time.monotonic() + (BROKEN_WAIT_S if is_hopeless else STOP_WAIT_S)
        for process in self._processes:
            if not process.wait(max(0.0, end - time.monotonic())):
                log.warning(
                    "%s pid=%d did not stop in time; killing it",
                    *(self._name(process.rank), process.pid),
                )
                process.kill()
                process.wait()
        self._deaths.close()
        for process in self._processes:
            process.close()
        if self._meeting_file is not None:
            self._meeting_file.unlink(missing_ok=True)
        self.socket.close()

    def _send_to(self, identity: bytes, frames: list[Any]) -> bool:
        """Send a message to a peer. Return False if the peer has disconnected."""
        try:
            self.socket.send_multipart([identity, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _name(self, rank: int) -> str:
        return name_of(rank, self._size)


def _meeting_place(config: EngineConfig, address: str) -> tuple[Path | None, str]:
    """Return a file and the address where the ranks meet: the file beside the socket at `address`
    if all ranks are on this machine, otherwise no file and a TCP address."""
    if config.worker_address:
        return None, sockets.next_port(config.worker_address)
    if config.tensor_parallel == 1:
        return None, ""
    # A new name for each group: an old file would contain the addresses of its ranks.
    name = f"{sockets.MEETING_FILE}{os.getpid()}-{secrets.token_hex(4)}"
    file = Path(address.removeprefix("ipc://")).absolute().with_name(name)
    return file, f"file://{file}"
