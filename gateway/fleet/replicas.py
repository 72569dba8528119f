"""The engine client of a server whose model is served by several engines, its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack, cast

from gateway.engine.base import RoutedEncodeOptions, RoutedOptions, Subscriber
from gateway.engine.client import ZmqEngineClient
from gateway.fleet.engine_fleet import EngineFleet, FleetOptions
from gateway.fleet.engine_list import EngineList
from gateway.fleet.paired_numerics import PairedNumerics
from gateway.fleet.replica_set import ReplicaSet
from gateway.fleet.replicated_request import ReplicatedRequest
from protocol.engine.encoding import EncodeInputs
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.wire.errors import InvalidRequest
from protocol.worker.kv import KV_FIELD


class ReplicatedClient(EngineFleet[ReplicatedRequest]):
    """The `EngineClient` over several replicas of one model.

    engines      the addresses of the replicas, which may change
    new_client   returns a client for an address
    """

    def __init__(
        self,
        engines: EngineList,
        new_client: Callable[[str], ZmqEngineClient],
        options: FleetOptions,
    ) -> None:
        numerics = PairedNumerics("replicas")
        replicas = ReplicaSet(engines, new_client, "replica", numerics)
        super().__init__(replicas, ReplicatedRequest, options)

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[RoutedOptions],
    ) -> int:
        """Send a request to a replica and return its number; see `RequestSender.generate`. Raises
        InvalidRequest if `options` contain K/V options, because no other replica could continue
        such a request."""
        if options.pop("kv_readers", 0) or options.pop("kv_handle", ""):
            message = f"{KV_FIELD}: not supported by a server with several engines"
            raise InvalidRequest(message, param=KV_FIELD)
        return super().generate(prompt, params, subscriber, **options)

    def encode(
        self,
        inputs: EncodeInputs,
        subscriber: Subscriber,
        **options: Unpack[RoutedEncodeOptions],
    ) -> int:
        """Send a request that encodes to a replica; see `RequestSender.encode`. If the replica is
        lost, another one computes the whole request again."""
        self.start()
        self._replicas.refresh()
        session = options.pop("session", "")
        request = ReplicatedRequest(
            number=self._new_number(),
            prompt=inputs.tokens,
            params=SamplingParams(max_tokens=0),
            subscriber=subscriber,
            options=cast(RoutedOptions, options),
            hashes=[],
            session=f"/{session}" if session else "",
            digest=self._replicas.digest,
            inputs=inputs,
        )
        self._open(request)
        return request.number
