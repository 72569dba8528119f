"""Runs a plain decode step on a GPU as captured graphs: its hundreds of launches become two.

A graph repeats fixed work on fixed memory. So there is one for each of some numbers of rows, the
bucket sizes, and a step uses the smallest bucket that holds its rows. The other rows of the bucket
are padding: they see no keys, write no keys and values, and append no token of their own. The step
uploads the slots and positions of its rows. Everything else is read from the slots.

The general path (batch.py, the model, sampling) is the reference: both give the same tokens.

Legend: R rows of a step, B rows of its bucket, M blocks of a slot's table, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.attention.base import Attention, AttentionBatch
from worker.batch.batch import BatchRows, Ints
from worker.device.staging import upload_into
from worker.kv.cache import PagedCache
from worker.lora.table import StepAdapters
from worker.models.base import RowModel, StepModel
from worker.models.decoder import DecoderModel
from worker.sampling.sampler import TokenChoice, most_likely
from worker.slots.table import SlotTable
from worker.step.decode_fast_path import is_plain

log = logging.getLogger(__name__)

PADDING = -1
"""The position of a row of padding."""
DENSE_ROWS = 8
"""Up to this many rows, each power of two is a bucket size. Beyond, the sizes are at most a quarter
apart, and multiples of DENSE_ROWS."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Captures the work that a function launches. Runs the function a few times, and returns
    another one that launches the same work on the same memory."""

    def __call__(self, work: Callable[[], None]) -> Replay: ...


# ---- the host's part: pure


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the ascending bucket sizes for steps of at most `max_rows` rows. The last one is
    `max_rows`."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size += size if size < DENSE_ROWS else max(size // 4 // DENSE_ROWS, 1) * DENSE_ROWS
    return [*sizes, max_rows]


def padded_rows(slots: Ints, starts: Ints, size: int) -> Ints:
    """Return [3, size]: the slots, starts and places of new tokens of a bucket's rows.

    The rows after the R real ones are padding. Their start is PADDING, and their token goes to the
    place of the first row's token. The device writes the first row's token there once more.
    """
    columns = np.empty((3, size), np.int64)
    count = len(slots)
    columns[:, :count] = slots, starts, starts + 1
    columns[:, count:] = np.array([slots[0], PADDING, starts[0] + 1])[:, None]
    return columns


# ---- the device's part


@dataclass(frozen=True, slots=True)
class BucketRows:
    """A bucket's rows in the device's memory, [B] int64 each (`padded_rows`), and constants."""

    slots: Tensor
    starts: Tensor
    places: Tensor
    #: [B + 1] int32: 0, 1, 2, ...
    row_starts: Tensor

    @property
    def is_padding(self) -> Tensor:
        return self.starts < 0


def decode_batch(
    rows: BucketRows, slots: SlotTable, *, block_tokens: int, num_entries: int
) -> tuple[Tensor, AttentionBatch]:
    """Return the token ids [B] int64 and the attention of rows that compute one position each. It
    reads nothing on the host, and launches the same work for all contents of `rows`."""
    positions, width = rows.starts.clamp(min=0), slots.fields["token_ids"].width
    items = rows.slots * width + positions
    token_ids = slots["token_ids"].view(-1).index_select(0, items).long()
    token_ids.masked_fill_(rows.is_padding, 0)  # a slot that was never bound holds no token
    tables = slots["block_table"].index_select(0, rows.slots)
    columns, offsets = positions // block_tokens * num_entries, positions % block_tokens
    size = len(positions)
    batches = [
        AttentionBatch(
            positions=positions,
            slot_mapping=torch.where(
                rows.is_padding,
                PADDING,
                tables.gather(1, columns[:, None] + entry).squeeze(1) * block_tokens + offsets,
            ),
            row_starts=torch.arange(size + 1),
            context_lens=torch.full((size,), width),
            block_table=tables if num_entries == 1 else tables[:, entry::num_entries].contiguous(),
            num_decodes=size,
            device_row_starts=rows.row_starts,
            device_context_lens=(rows.starts + 1).int(),
        )
        for entry in range(num_entries)
    ]
    return token_ids, replace(batches[0], further=tuple(batches[1:]))


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """The graphs of one bucket, and the memory that they read and write.

    inputs    [3, B] int64, see `padded_rows`
    logits    [B, V] float32, which `forward` computes; the same memory in all buckets
    hidden    [B, hidden], which `forward` computes; the same memory in all buckets
    choice    the most likely tokens, which `choose` computes and appends
    """

    inputs: Tensor
    logits: Tensor
    hidden: Tensor
    choice: TokenChoice
    forward: Replay
    choose: Replay


class GraphDecode:
    """The captured decode steps of one model, its slots and its cache. Implements PlainDecode.

    A step with adapters is not captured, because the host groups its tokens by adapter."""

    takes_adapters = False
    chosen = 0

    def __init__(
        self,
        model: DecoderModel,
        slots: SlotTable,
        cache: PagedCache,
        attention: Attention,
        capture: Capture,
    ) -> None:
        self._model = model
        self._slots = slots
        self._cache = cache
        self._attention = attention
        self._capture = capture
        self._sizes = np.array(bucket_sizes(slots.max_slots))
        #: [max_slots, V] float32, which all buckets share: only the last step's logits are valid.
        self._logits: Tensor | None = None
        #: [max_slots, hidden], shared in the same way.
        self._hidden: Tensor | None = None
        self._buckets: dict[int, CapturedBucket] = {}
        self._bucket: CapturedBucket | None = None

    @classmethod
    def for_model(
        cls,
        model: StepModel | RowModel,
        slots: SlotTable,
        cache: PagedCache,
        attention: Attention,
        capture: Capture,
    ) -> Self | None:
        """Return the captured steps of a model, or None if its steps cannot be captured."""
        if reason := reason_against_graphs(model, attention):
            log.info("decode steps are not captured: %s", reason)
            return None
        assert isinstance(model, DecoderModel)
        return cls(model, slots, cache, attention, capture)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all buckets, the largest first, so that the others reuse its memory. Call this
        before any slot is bound, because the captured work runs with padding only."""
        for size in self._sizes[::-1].tolist():
            self._buckets[size] = self._captured(size)

    def is_for(self, plan: StepPlan, rows: BatchRows) -> bool:
        return is_plain(plan, rows) and len(rows.slots) <= self._sizes[-1]

    def __call__(
        self, slots: Ints, starts: Ints, *, choose: bool, adapters: StepAdapters | None = None
    ) -> tuple[Tensor, TokenChoice | None]:
        assert adapters is None
        table, count = self._slots, len(slots)
        width = table.fields["token_ids"].width
        if slots.min() < 0 or slots.max() >= table.max_slots:
            raise ValueError(f"a row's slot is outside the {table.max_slots} slots")
        if starts.min() < 0 or starts.max() >= width - 1:
            raise ValueError(f"a row exceeds {width} tokens")
        size = int(self._sizes[self._sizes.searchsorted(count)])
        bucket = self._bucket = self._buckets[size]
        upload_into(bucket.inputs, padded_rows(slots, starts, size))
        bucket.forward()
        if not choose:
            return bucket.logits[:count], None
        bucket.choose()
        chosen = bucket.choice
        return bucket.logits[:count], TokenChoice(chosen.tokens[:count], chosen.finite[:count])

    def places(self, rows: BatchRows) -> tuple[Tensor, Tensor]:
        assert self._bucket is not None, "a step must run first"
        slots, _, places = self._bucket.inputs[:, : len(rows.slots)]
        return slots, places

    def hidden(self, num_rows: int) -> Tensor:
        assert self._bucket is not None, "a step must run first"
        return self._bucket.hidden[:num_rows]

    def _captured(self, size: int) -> CapturedBucket:
        table, device = self._slots, self._slots.device
        inputs = torch.zeros(3, size, dtype=torch.int64, device=device)
        inputs[1].fill_(PADDING)
        row_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        rows = BucketRows(inputs[0], inputs[1], inputs[2], row_starts)
        results: list[Tensor] = []
        choices: list[TokenChoice] = []

        def forward() -> None:
            token_ids, batch = decode_batch(
                rows,
                table,
                block_tokens=self._cache.block_tokens,
                num_entries=self._cache.num_entries,
            )
            hidden = self._model(token_ids, batch, self._cache, self._attention)
            logits = self._model.logits(hidden)
            if self._logits is None or self._hidden is None:  # the first run: the largest bucket
                self._logits, self._hidden = torch.empty_like(logits), torch.empty_like(hidden)
            results[:] = [
                shared[:size].copy_(each)
                for shared, each in ((self._logits, logits), (self._hidden, hidden))
            ]

        def choose() -> None:
            choice = most_likely(results[0])
            tokens = torch.where(rows.is_padding, choice.tokens[:1], choice.tokens)
            table.append_tokens(rows.slots, rows.places, tokens)
            choices[:] = [choice]

        forward_again, choose_again = self._capture(forward), self._capture(choose)
        logits, hidden = results
        return CapturedBucket(inputs, logits, hidden, choices[0], forward_again, choose_again)


def reason_against_graphs(model: StepModel | RowModel, attention: Attention) -> str:
    """Return why the decode steps of a model cannot be captured; "" if they can."""
    if not isinstance(model, DecoderModel):
        return "the model is computed by transformers"
    if any(mlp.num_experts > 1 for mlp in model.spec.mlps):
        return "the host chooses the rows of each expert"
    if model.spec.state_items:
        return "the host chooses the states of recurrent layers"
    if any(each.chunk is not None for each in model.spec.attentions):
        return "the host finds the chunk of each token"
    if any(each.latent and each.latent.indexer for each in model.spec.attentions):
        return "the host divides the tokens among which an indexer selects"
    return "" if attention.is_capturable else "the attention backend makes its plan on the host"


class CudaGraphs:
    """Captures CUDA graphs, which share their memory."""

    WARM_UPS = 2
    """Runs before the capture. Libraries allocate their workspaces in the first ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all, because cuBLAS keeps a workspace for each: 32 MiB on Hopper.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay
