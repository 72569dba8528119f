"""K/V of other engines of the cluster: checks requests, and seals and opens handles.

Every error raised here is an InvalidRequest with param=KV_FIELD.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.blocks.hash import ContentHashes
from engine_core.kv.fetches import Match
from engine_core.kv.seal import Seal
from engine_core.requests.kv_handle import Handle
from engine_core.requests.request import Request
from protocol.config.engine import EngineConfig
from protocol.engine.messages import Generate, Limits
from protocol.wire.errors import InvalidRequest
from protocol.worker.kv import KV_FIELD, KVEndpoint, PeerSource

MAX_READERS = 1024


@dataclass(frozen=True)
class PeerCluster:
    """Describes this engine as a member of a cluster."""

    #: Secret for sealing handles, derived from the cluster's key.
    secret: bytes
    #: Identifies this life of the engine.
    epoch: str
    #: The worker's K/V endpoint; None if the worker transfers no K/V.
    endpoint: KVEndpoint | None


class Peers:
    """The other engines of the cluster: as suppliers of K/V for this engine's requests, and as
    readers of its own. `cluster` is None for an engine that belongs to no cluster."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: PeerCluster | None,
        hashes: ContentHashes,
        limits: Limits,
    ) -> None:
        self._role = config.role
        self._cluster = cluster
        self._seal = Seal(cluster.secret) if cluster is not None else None
        self._hashes = hashes
        self._block_tokens = limits.block_tokens
        self._has_state = limits.state_bytes > 0

    def check(self, message: Generate) -> None:
        """Raise InvalidRequest if this engine cannot serve the request's K/V fields."""
        if not 0 <= message.kv_readers <= MAX_READERS:
            raise _refusal(f"kv_readers is {message.kv_readers}; it must be 0 to {MAX_READERS:,}")
        if self._role == "prefill" and not message.kv_readers:
            raise _refusal("this engine (role prefill) only computes prompts for other engines")
        if not message.kv_readers and not message.kv_handle:
            return
        if message.kv_readers and message.kv_handle:
            raise _refusal("a request with a kv_handle cannot have kv_readers")
        endpoint = self._require_endpoint()[1]
        if message.kv_readers and self._role == "decode":
            raise _refusal("this engine (role decode) does not compute prompts for other engines")
        if message.kv_readers and not endpoint.address:
            raise _refusal("this engine cannot hand over K/V: its worker exports none")

    def seal_handle(self, request: Request, lease: bytes) -> str:
        """Return a sealed handle for the K/V of all positions that `request` has computed."""
        seal, endpoint, epoch = self._require_endpoint()
        handle = Handle(
            lease=lease,
            epoch=epoch,
            address=endpoint.address,
            num_tokens=request.num_computed,
            layout=endpoint.layout,
            layout_text=endpoint.layout_text,
            content=self._content(request, request.num_computed),
        )
        return seal.to_text(handle)

    def open_handle(self, text: str, request: Request) -> Handle:
        """Return the handle in `text`, which the client of `request` has sent.

        Raises InvalidRequest unless the handle covers a prefix of the request's prompt, in the K/V
        layout of this engine's worker.
        """
        seal, endpoint, _ = self._require_endpoint()
        handle = seal.from_text(text)
        if handle.layout != endpoint.layout:
            raise _refusal(
                f"the K/V layouts differ: {handle.layout_text} there; {endpoint.layout_text} here"
            )
        if not 0 < handle.num_tokens <= request.prompt_tokens:
            raise _refusal(
                f"the handle covers {handle.num_tokens:,} tokens, but the prompt has "
                f"{request.prompt_tokens:,}"
            )
        if handle.content != self._content(request, handle.num_tokens):
            raise _refusal("the handle belongs to another prompt, namespace or adapter")
        return handle

    def lease_from_handle(self, text: str) -> bytes | None:
        """Return the lease named by a handle that this engine has written in its present life.
        Return None for any other text."""
        if self._seal is None or self._cluster is None:
            return None
        try:
            handle = self._seal.from_text(text)
        except InvalidRequest:
            return None  # not from this cluster
        return handle.lease if handle.epoch == self._cluster.epoch else None

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the part of the K/V named by the request's handle that must still be fetched if
        the request's first `num_blocks` blocks are filled already.

        Return None if there is no handle or no such part, if the request was preempted, or if it
        needs prompt logprobs and so must compute its whole prompt. The part never includes the last
        token of the prompt, because computing that token gives the first logits. So if the handle
        includes that token, and the model has a recurrent state, there is no such part: the state
        follows that token.
        """
        handle = request.handle
        must_compute = request.num_preemptions or request.params.prompt_logprobs is not None
        if handle is None or must_compute:
            return None
        # The last token must be computed here, because the step needs its logits.
        num_tokens = request.last_end(min(handle.num_tokens, request.prompt_tokens - 1))
        if num_tokens <= num_blocks * self._block_tokens:
            return None
        if self._has_state and num_tokens < handle.num_tokens:
            return None
        return Match(
            source=PeerSource(address=handle.address, lease=handle.lease, first=num_blocks),
            num_blocks=-(-num_tokens // self._block_tokens) - num_blocks,
            num_tokens=num_tokens,
        )

    def _content(self, request: Request, num_tokens: int) -> bytes:
        return self._hashes.prefix_hash(
            request.hashes,
            request.namespace,
            request.tokens,
            num_tokens,
            request.adapter_digest,
            request.images,
        )

    def _require_endpoint(self) -> tuple[Seal, KVEndpoint, str]:
        """Return (seal, endpoint, epoch). Raises InvalidRequest if the engine or its worker
        transfers no K/V."""
        if self._seal is None or self._cluster is None:
            raise _refusal(
                "this engine transfers no K/V: it needs --cluster-key, and either --role or "
                "--kv-address"
            )
        if self._cluster.endpoint is None:
            raise _refusal("this engine cannot hand over K/V: its worker transfers none")
        return self._seal, self._cluster.endpoint, self._cluster.epoch


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=KV_FIELD)
