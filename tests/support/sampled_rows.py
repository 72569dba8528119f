"""Sampled rows with parameters of their own, without plan or model: to test what follows logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.sampling import SamplingParams
from tests.support.plans import slot_init
from tests.support.tiny_model import tiny_slots
from worker.batch.batch import Sampled, features_of_rows
from worker.debug.slot_registry import Poison
from worker.slots.table import SlotTable


@dataclass
class Asker:
    """A request that gets a token now: what it knows, and how it wants the next one chosen."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1])
    prompt_tokens: int = 1
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)


def asking(askers: Sequence[Asker]) -> tuple[SlotTable, Sampled]:
    """Slots that hold the askers, in falling order so that no row is its own slot; their rows."""
    slots = tiny_slots(len(askers) + 2, poison=Poison.WILD)
    at = [len(askers) + 1 - row for row in range(len(askers))]
    for slot, asker in zip(at, askers, strict=True):
        init = slot_init(
            slot,
            asker.tokens,
            prompt_tokens=asker.prompt_tokens,
            seed=asker.seed,
            stop_ids=asker.stop_ids,
            params=asker.params,
        )
        slots.bind(init)
    slots.flush()
    host_slots = torch.tensor(at)
    host_known = torch.tensor([len(asker.tokens) for asker in askers])
    extras = features_of_rows(slots, host_slots.numpy())
    last = torch.arange(len(at))
    return slots, Sampled(host_slots, host_known, host_slots, host_known, last, extras)
