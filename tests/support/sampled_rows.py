"""Sampled rows with parameters of their own, without plan or model, for tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.engine.sampling import SamplingParams
from tests.support.plans import slot_init
from tests.support.tiny_model import tiny_slots
from worker.batch.batch import Sampled, features_of_rows
from worker.slots.table import SlotTable
from worker.step.slot_registry import Poison


@dataclass
class RowRequest:
    """A request that samples a token now: its known tokens, and the parameters."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1])
    prompt_tokens: int = 1
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)


def bind_rows(requests: Sequence[RowRequest]) -> tuple[SlotTable, Sampled]:
    """Bind the requests to slots and return the slots and the sampled rows. Slots are in descending
    order, so that at most one row's index equals its slot."""
    slots = tiny_slots(len(requests) + 2, poison=Poison.WILD)
    at = [len(requests) + 1 - row for row in range(len(requests))]
    for slot, request in zip(at, requests, strict=True):
        init = slot_init(
            slot,
            request.tokens,
            prompt_tokens=request.prompt_tokens,
            seed=request.seed,
            stop_ids=request.stop_ids,
            params=request.params,
        )
        slots.bind(init)
    slots.flush()
    host_slots = torch.tensor(at)
    host_known = torch.tensor([len(request.tokens) for request in requests])
    features = features_of_rows(slots, host_slots.numpy())
    last = torch.arange(len(at))
    return slots, Sampled(host_slots, host_known, host_slots, host_known, last, features)
