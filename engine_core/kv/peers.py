"""What engines of one cluster may ask of each other: who hands over, who goes on, by what handle.

Every refusal here is the request's, and names what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.blocks.hash import ContentHashes
from engine_core.kv.fetches import Match
from engine_core.kv.handle import Handle, Seal
from engine_core.request import Request
from protocol.config.engine import EngineConfig
from protocol.errors import InvalidRequest
from protocol.kv import KV_FIELD, KVEndpoint, PeerSource
from protocol.messages import Generate

MAX_READERS = 1024


@dataclass(frozen=True)
class PeerCluster:
    """What an engine needs to be one of several.

    secret    of the cluster's key, for handles
    epoch     this life of the engine
    endpoint  of its worker; None: it moves no K/V
    """

    secret: bytes
    epoch: str
    endpoint: KVEndpoint | None


class Peers:
    """The supplier of K/V that other engines have computed. `cluster`: None for an engine alone."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: PeerCluster | None,
        hashes: ContentHashes,
        block_tokens: int,
    ) -> None:
        self._role = config.role
        self._cluster = cluster
        self._seal = Seal(cluster.secret) if cluster is not None else None
        self._hashes = hashes
        self._block_tokens = block_tokens

    def check(self, message: Generate) -> None:
        """Raises InvalidRequest where this engine cannot do its part, whatever the prompt."""
        if not 0 <= message.kv_readers <= MAX_READERS:
            raise _refusal(f"kv_readers is {message.kv_readers}; it may be 0 to {MAX_READERS:,}")
        if self._role == "prefill" and not message.kv_readers:
            raise _refusal("this engine (role prefill) computes prompts for others, and no answers")
        if not message.kv_readers and not message.kv_handle:
            return
        if message.kv_readers and message.kv_handle:
            raise _refusal("what goes on from a handle cannot be handed over again")
        endpoint = self._expect()[1]
        if message.kv_readers and self._role == "decode":
            raise _refusal("this engine (role decode) computes no prompts for others")
        if message.kv_readers and not endpoint.address:
            raise _refusal("this engine hands over no K/V: its worker exports none")

    def write(self, request: Request, lease: bytes) -> str:
        """The handle of all that `request` has computed."""
        seal, endpoint, epoch = self._expect()
        handle = Handle(
            lease=lease,
            epoch=epoch,
            address=endpoint.address,
            num_tokens=request.num_computed,
            layout=endpoint.layout,
            told=endpoint.told,
            content=self._content(request, request.num_computed),
        )
        return seal.close(handle)

    def read(self, text: str, request: Request) -> Handle:
        """The handle that `request` brings. Raises InvalidRequest unless it is of the beginning of
        its prompt, in a layout that this engine's worker has, too."""
        seal, endpoint, _ = self._expect()
        handle = seal.open(text)
        if handle.layout != endpoint.layout:
            raise _refusal(
                f"the K/V is laid out in another way: there {handle.told}; here {endpoint.told}"
            )
        if not 0 < handle.num_tokens <= request.prompt_tokens:
            raise _refusal(
                f"the handle is of {handle.num_tokens:,} tokens, and the prompt has "
                f"{request.prompt_tokens:,}"
            )
        if handle.content != self._content(request, handle.num_tokens):
            raise _refusal("the handle is of another prompt, or of another namespace")
        return handle

    def lease_of(self, text: str) -> bytes | None:
        """The lease that a handle of this life of this engine names."""
        if self._seal is None or self._cluster is None:
            return None
        try:
            handle = self._seal.open(text)
        except InvalidRequest:
            return None  # foreign
        return handle.lease if handle.epoch == self._cluster.epoch else None

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """A request fetches in its first life only. Who wants its prompt's logprobs computes it."""
        handle = request.handle
        must_compute = request.num_preemptions or request.params.prompt_logprobs is not None
        if handle is None or must_compute:
            return None
        # The last token is always computed here: its logits are what a step is for.
        num_tokens = min(handle.num_tokens, request.prompt_tokens - 1)
        if num_tokens <= num_blocks * self._block_tokens:
            return None
        return Match(
            source=PeerSource(address=handle.address, lease=handle.lease, first=num_blocks),
            num_blocks=-(-num_tokens // self._block_tokens) - num_blocks,
            num_tokens=num_tokens,
        )

    def _content(self, request: Request, num_tokens: int) -> bytes:
        return self._hashes.of_beginning(
            request.hashes, request.namespace, request.tokens, num_tokens
        )

    def _expect(self) -> tuple[Seal, KVEndpoint, str]:
        """Raises InvalidRequest where there is no cluster, or the worker moves nothing."""
        if self._seal is None or self._cluster is None:
            raise _refusal("this engine hands over no K/V: it has no cluster key")
        if self._cluster.endpoint is None:
            raise _refusal("this engine hands over no K/V: its worker moves none")
        return self._seal, self._cluster.endpoint, self._cluster.epoch


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=KV_FIELD)
