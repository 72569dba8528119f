"""Builds plans by hand, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from protocol.engine.sampling import SamplingParams, first_mu
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import NO_ADAPTER, NO_CHECKPOINT, SlotInit, SlotRelease, StepPlan

GREEDY = SamplingParams(temperature=0.0)


def slot_init(
    slot: int,
    tokens: Sequence[int],
    *,
    generation: int = 1,
    prompt_tokens: int | None = None,
    num_computed: int = 0,
    blocks: Sequence[int] = (),
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    adapter: int = NO_ADAPTER,
    adapter_generation: int = 0,
    checkpoint: int = NO_CHECKPOINT,
    mirostat_mu: float | None = None,
) -> SlotInit:
    return SlotInit(
        slot=slot,
        generation=generation,
        tokens=Int32.of(tokens),
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        num_computed=num_computed,
        blocks=Int32.of(blocks),
        seed=seed,
        stop_ids=list(stop_ids),
        params=params,
        adapter=adapter,
        adapter_generation=adapter_generation,
        checkpoint=checkpoint,
        mirostat_mu=first_mu(params) if mirostat_mu is None else mirostat_mu,
    )


def step_plan(
    step: int = 0,
    *,
    release: Sequence[tuple[int, int]] = (),
    bind: Sequence[SlotInit] = (),
    extend: Sequence[tuple[int, int, int]] = (),
    zero: Sequence[int] = (),
    rows: Sequence[tuple[int, int, int, bool]] = (),
    masked: Sequence[int] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
    follow: Mapping[int, tuple[int, int]] | None = None,
    saves: Sequence[tuple[int, int, int]] = (),
) -> StepPlan:
    """Return a plan. Rows of one token are put first.

    rows      (slot, first position, number of tokens, is sampled)
    release   (slot, generation)
    extend    (slot, index in the slot's block table, block id)
    masked    indexes into the sampled places, after the rows are sorted
    drafts    slot -> drafts, which the row's number of tokens includes
    follow    slot -> (first position of the draft model, number of proposals); without proposals
              the draft model computes up to the row's last token
    saves     (slot, number of positions, checkpoint)
    """
    rows = sorted(rows, key=lambda row: row[2] != 1)
    row_drafts = [list((drafts or {}).get(row[0], [])) for row in rows]
    follow_rows = [(follow or {}).get(row[0], (-1, 0)) for row in rows]
    saved = [Int32.of(column) for column in zip(*saves, strict=True)] if saves else [None] * 3
    slots, indexes, ids = zip(*extend, strict=True) if extend else ((), (), ())
    return StepPlan(
        step=step,
        release=[SlotRelease(slot=slot, generation=number) for slot, number in release],
        bind=list(bind),
        block_slots=Int32.of(slots),
        block_indexes=Int32.of(indexes),
        block_ids=Int32.of(ids),
        zero_blocks=Int32.of(zero),
        row_slots=Int32.of(row[0] for row in rows),
        row_starts=Int32.of(row[1] for row in rows),
        row_tokens=Int32.of(row[2] for row in rows),
        row_samples=UInt8.of(row[3] for row in rows),
        num_decodes=sum(row[2] == 1 for row in rows),
        masked=Int32.of(masked) if masked else None,
        row_drafts=Int32.of(map(len, row_drafts)) if drafts else None,
        drafts=Int32.of(chain.from_iterable(row_drafts)) if drafts else None,
        follow_starts=Int32.of(start for start, _ in follow_rows) if follow else None,
        follow_tokens=Int32.of(
            0 if wanted or start < 0 else row[1] + row[2] - start
            for row, (start, wanted) in zip(rows, follow_rows, strict=True)
        )
        if follow
        else None,
        wanted=Int32.of(wanted for _, wanted in follow_rows) if follow else None,
        save_slots=saved[0],
        save_lens=saved[1],
        save_checkpoints=saved[2],
    )
