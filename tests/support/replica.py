"""The real engine and the real worker's runner in one process, without sockets.

Tests check the tokens, batches and blocks that they compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.engine import Engine
from engine_core.grammar.compiler import Compiler
from engine_core.grammar.jobs import CompiledGrammar
from engine_core.kv.peers import PeerCluster
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.grammar import Grammar
from protocol.engine.kv_window import KVGroups, max_request_tokens, num_column_blocks
from protocol.engine.messages import Accepted, Generate, Limits, Output
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVFetch
from protocol.worker.steps import Masks, StepPlan, StepResult
from tests.support.adapters import new_table
from tests.support.handover import ClusterMember, EchoMover
from tests.support.model import smollm2_gguf
from tests.support.replica_transfers import ReplicaTransfers
from tests.support.tiny_model import new_slots
from tools.models.fetch import home
from worker.attention.select import select_attention
from worker.device.cpuinfo import cpu_flags
from worker.draft.base import TokenProposer
from worker.draft.head import HeadDrafter
from worker.draft.model import DraftModel
from worker.kernels.number_types import number_types
from worker.kernels.select import select_kernels
from worker.kv.cache import KVCache, PagedCache, cache_bytes, make_cache
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.transfer.shared_memory import SharedMemory
from worker.loading.decoder import LoadedModel, load_model
from worker.loading.draft_head import LoadedHead, load_head
from worker.loading.header import read_header
from worker.lora.adapter import Adapter
from worker.models.base import RowModel
from worker.models.decoder import DecoderModel
from worker.slots.fields import STATE, slot_fields
from worker.slots.table import SlotTable
from worker.spec.kv_blocks import BlockLayers
from worker.startup.kv_window import kv_groups
from worker.step.runner import Runner
from worker.step.slot_registry import Poison

CLIENT = b"test"


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    """Load a model on the CPU. `options` are further options of `load_model`. By default, torch's
    kernels compute. The times of packed weights are measured once on each machine."""
    options = {"measurements": home() / "tests" / "measurements", **options}
    return load_model(path, dtype=dtype, device=torch.device("cpu"), **options)


def load_own_head(path: Path, loaded: LoadedModel, **options: Any) -> LoadedHead:
    """Load the head of a model for drafts. `options` are further options of `load_head`."""
    dtype = getattr(torch, loaded.card.dtype)
    cpu = torch.device("cpu")
    return load_head(read_header(path), loaded.model, dtype=dtype, device=cpu, **options)


@dataclass(frozen=True)
class Arrived:
    """K/V that was fetched into `blocks`: k, v [L, B, block_tokens, H_kv, D]."""

    blocks: list[int]
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, cache: PagedCache, blocks: list[int]) -> Arrived:
        """Return what is in blocks of a cache."""
        assert isinstance(cache, KVCache)
        return cls(blocks, cache.k[:, blocks].clone(), cache.v[:, blocks].clone())

    def write(self, cache: PagedCache) -> None:
        assert isinstance(cache, KVCache)
        cache.k[:, self.blocks], cache.v[:, self.blocks] = self.k, self.v


@dataclass(frozen=True)
class Executed:
    """A step as the worker executed it, and the K/V that arrived since the step before."""

    plan: StepPlan
    masks: Masks | None
    result: StepResult
    arrived: list[Arrived] = field(default_factory=list)


class ReplicaBlocks:
    """The blocks of a real cache, for a mover."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def __getitem__(self, block: int) -> Arrived:
        return Arrived.of(self._cache, [block])

    def __setitem__(self, block: int, content: Arrived | list[int]) -> None:
        if isinstance(content, Arrived):
            replace(content, blocks=[block]).write(self._cache)
        else:
            # With all bits set, a float is NaN, and so is the scale of a rounded head.
            self._cache.rows[:, block] = 255


class ReplicaStates:
    """The checkpoints of a real worker [1 + C, items], for a mover."""

    def __init__(self, states: Tensor) -> None:
        self._states = states

    def __getitem__(self, checkpoint: int) -> Tensor:
        return self._states[checkpoint].clone()

    def __setitem__(self, checkpoint: int, content: Tensor | tuple[int, ...]) -> None:
        self._states[checkpoint] = content if isinstance(content, Tensor) else float("nan")


@dataclass
class Replica:
    """An engine with its worker. `run` computes everything that was added; `outputs[n]` are the
    outputs of request n.

    num_checkpoints   number of checkpoints, if the model has a recurrent state
    max_len           maximum number of tokens of prompt and answer; None: the model's own limit
    options           other fields of EngineConfig
    draft             the draft model, if any
    head              the head of `loaded` for drafts, if it is used
    adapters          name -> LoRA adapter of the worker
    draft_cost        cost of a draft step that is reported to the engine
    place             the replica's place in a cluster, if any: `move` carries out the oldest fetch
    moves             options of the worker's real K/V transfers, if it has any; `close` ends them
    steps_in_flight   plans that are made before the first of them is executed
    is_timed          whether the engine gets the times of steps; if not, its decisions depend on no
                      clock
    steps             the executed steps, in order
    out               plans that are not yet executed
    """

    loaded: LoadedModel
    token_budget: int = 512
    max_slots: int = 16
    num_blocks: int = 1024
    num_checkpoints: int = 24
    block_tokens: int = 16
    prefix_cache: bool = True
    steps_in_flight: int = 1
    is_timed: bool = False
    max_len: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    draft: LoadedModel | None = None
    head: LoadedHead | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    draft_cost: float = 0.0
    place: ClusterMember | None = None
    moves: WorkerConfig | None = None
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    steps: list[Executed] = field(default_factory=list)
    out: deque[StepPlan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        config = self.loaded.spec
        kept_for = (self.draft, self.head, self.place, self.moves)
        keeps_all = any(each is not None for each in kept_for)
        window = None if keeps_all else config.window
        options = WorkerConfig(model="", max_len=self.max_len or 0)
        groups = None if keeps_all else kv_groups(options, [config])
        max_len = max_request_tokens(
            self.max_len or config.context_tokens,
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            window=window,
            groups=groups,
        )
        limits = Limits(
            max_len=max_len,
            max_slots=self.max_slots,
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
            kv_window=window,
            kv_groups=groups,
            max_adapters=len(self.adapters),
            state_bytes=4 * config.state_items,
            num_checkpoints=self.num_checkpoints if config.state_items else 0,
        )
        shared, states = self.moves is not None and self.moves.kv_export, None
        if shared and limits.num_checkpoints:
            states = CheckpointMemory.in_shared_memory(limits.num_checkpoints, config.state_items)
        slots = slot_table(
            max_len,
            self.block_tokens,
            self.max_slots,
            groups=groups,
            state_items=config.state_items,
            num_checkpoints=limits.num_checkpoints,
            checkpoints=None if states is None else states.states,
            head_hidden=0 if self.head is None else self.head.spec.hidden,
        )
        if limits.num_checkpoints and states is None:
            states = CheckpointMemory(slots.checkpoints[STATE])
        self.states = states
        self.cache = new_cache(
            self.loaded, self.num_blocks, self.block_tokens, groups, is_shared=shared
        )
        self.runner = new_runner(
            self.loaded, slots, self.cache, self.draft, [*self.adapters.values()], self.head
        )
        self.mover = None
        if self.place is not None:
            kept = None if states is None else ReplicaStates(states.states)
            self.mover = EchoMover(self.place, ReplicaBlocks(self.cache), self.block_tokens, kept)
        self.transfers = None
        if self.moves is not None:
            self.transfers = ReplicaTransfers.of(self.moves, self.loaded.card, self.cache, states)
        self._arrived: list[Arrived] = []  # since the last step
        self._seeds = iter(range(1, 1 << 30))
        self._masks: Masks | None = None  # of the oldest plan that is not executed
        worker = WorkerConfig(model="", draft_model="a draft model" if self.draft else "")
        engine_config = EngineConfig(
            worker=worker, steps_in_flight=self.steps_in_flight, **self.options
        )
        self.engine = Engine(
            engine_config,
            self.loaded.card,
            limits,
            draft_cost=self.draft_cost,
            draw_seed=lambda: 7919 * next(self._seeds),
            cluster=self._cluster,
            tiers=() if self.transfers is None else self.transfers.tiers,
            adapters=[
                AdapterInfo(name=name, digest=adapter.digest, rank=adapter.rank, path=name)
                for name, adapter in self.adapters.items()
            ],
        )

        self.receive_report()  # the blocks that a directory holds

    @property
    def _cluster(self) -> PeerCluster | None:
        place = self.place or self.transfers
        return None if place is None else place.cluster

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        grammar: Grammar | None = None,
        **fields: Any,
    ) -> int:
        """Add a request, and return its number. `fields` are other fields of Generate."""
        number = len(self.outputs)
        message = Generate(
            request=number, prompt=Int32.of(prompt), params=params, grammar=grammar, **fields
        )
        reply = self.engine.add(CLIENT, message)
        for job in self.engine.drain_compile_jobs():
            compiled = CompiledGrammar(job.digest, self.compiler.compile(job.grammar))
            ((_, reply),) = self.engine.on_grammar_compiled(compiled)
        assert reply == Accepted(request=number)
        self.outputs[number] = []
        return number

    @cached_property
    def compiler(self) -> Compiler:
        return Compiler(self.loaded.card)

    def run(self) -> None:
        while self.step():
            pass
        self.engine.check()

    def step(self) -> bool:
        """Plan as many steps as possible, and execute the oldest. If requests wait for K/V instead,
        wait for a report of the transfers. Return False if there is nothing to do."""
        self.receive_report()
        self.plan()
        if self.out:
            self.finish()
        elif self.transfers is not None and self.engine.num_open:
            self.transfers.wait()
        else:
            return False
        return True

    def receive_report(self) -> None:
        """Pass a report of the real transfers, if there is one, on to the engine."""
        if self.transfers is not None and (report := self.transfers.report()) is not None:
            for news in self.engine.on_kv_report(report).values():
                self._record(news.outputs)

    def close(self) -> None:
        """End the real transfers, if there are any."""
        if self.transfers is not None:
            self.transfers.close()

    def plan(self) -> None:
        """Make all plans that are possible."""
        while (plan := self.engine.plan()) is not None:
            assert isinstance(plan, StepPlan), "no request here encodes"
            self.out.append(plan)
            if len(self.out) == 1:
                self._masks = self.engine.masks()
        self._send_kv_commands()

    def _send_kv_commands(self) -> None:
        for order in self.engine.drain_kv_commands():
            if isinstance(order, KVFetch):
                self.runner.zero_draft_blocks(order.blocks)
            mover = self.mover or self.transfers
            assert mover is not None
            mover.apply(order)

    def move(self, fault: str = "") -> None:
        """Carry out the oldest fetch, if there is one. `fault` is the kind of its failure; "": it
        succeeds."""
        self._send_kv_commands()
        if self.mover is None or not self.mover.jobs:
            return
        job, order = next(iter(self.mover.jobs.items()))
        report = self.mover.carry_out(job, fault)
        if report.fetched:
            blocks = order.blocks.tolist()
            self._arrived.append(Arrived.of(self.cache, blocks))
        for news in self.engine.on_kv_report(report).values():
            self._record(news.outputs)

    def finish(self) -> None:
        """Let the worker execute the oldest plan, and the engine commit its result."""
        plan, masks = self.out.popleft(), self._masks
        result = self.runner.step(plan, lambda: masks)
        self.steps.append(Executed(plan, masks, result, self._arrived))
        self._arrived = []
        elapsed_s = result.compute_s if self.is_timed else 0.0
        for news in self.engine.commit(result, elapsed_s).values():
            self._record(news.outputs)
        self._masks = self.engine.masks()

    def is_ended(self, number: int) -> bool:
        return any(output.finish is not None for output in self.outputs[number])

    def abort(self, number: int) -> None:
        self._record(self.engine.abort(CLIENT, [number]))

    def _record(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs[output.request].append(output)

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def answers(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Return the answers to all prompts, which are computed together as far as there are
        slots."""
        numbers = [self.add(prompt, params) for prompt in prompts]
        self.run()
        return [self.tokens(number) for number in numbers]


@contextmanager
def replica_as_served(*, max_slots: int = 16) -> Iterator[Replica]:
    """Yield a replica of the default model with the number types and kernels that a server would
    choose. It uses one thread, because two would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu, flags = torch.device("cpu"), cpu_flags()
    kernels = select_kernels("auto", cpu, cpu_flags=flags)
    dtype, kv_dtype, rounds, _ = number_types(WorkerConfig(model=""), is_gpu=False, cpu_flags=flags)
    loaded = load(
        smollm2_gguf(),
        getattr(torch, dtype),
        kernels=kernels,
        kv_dtype=kv_dtype,
        rounds_floats=rounds,
    )
    try:
        yield Replica(loaded, max_slots=max_slots)
    finally:
        torch.set_num_threads(before)


def slot_table(
    max_len: int,
    block_tokens: int,
    max_slots: int,
    *,
    poison: Poison | None = Poison.WILD,
    kind: type[SlotTable] = SlotTable,
    groups: KVGroups | None = None,
    state_items: int = 0,
    num_checkpoints: int = 0,
    checkpoints: Tensor | None = None,
    head_hidden: int = 0,
) -> SlotTable:
    num_blocks = -(-max_len // block_tokens) * num_column_blocks(groups)
    fields = slot_fields(max_len, num_blocks, state_items, head_hidden)
    device = torch.device("cpu")
    return new_slots(
        fields,
        max_slots,
        device,
        poison=poison,
        kind=kind,
        num_checkpoints=num_checkpoints,
        checkpoints=checkpoints,
    )


def new_cache(
    loaded: LoadedModel,
    num_blocks: int,
    block_tokens: int,
    groups: KVGroups | None = None,
    *,
    is_shared: bool = False,
) -> PagedCache:
    """Return a cache for a model. Other replicas can map it if `is_shared`."""
    layers, dtype = BlockLayers.of(loaded.spec, by_window=groups is not None), loaded.kv_dtype
    num_bytes = cache_bytes(layers, num_blocks, block_tokens, dtype)
    shared = SharedMemory(num_bytes) if is_shared else None
    return make_cache(layers, num_blocks, block_tokens, dtype, torch.device("cpu"), shared)


def new_runner(
    loaded: LoadedModel,
    slots: SlotTable,
    cache: PagedCache,
    draft: LoadedModel | None = None,
    adapters: Sequence[Adapter] = (),
    head: LoadedHead | None = None,
) -> Runner:
    """Return a new worker's runner for a loaded model, with a draft model or its head, if either is
    given, and with LoRA adapters in the first rows of its table."""
    dtype, kernels = getattr(torch, loaded.card.dtype), loaded.model.kernels
    attention = select_attention(cache.block_tokens, dtype=dtype, kernels=kernels)
    draft_model: TokenProposer | None = None
    if head is not None:
        layers = BlockLayers.of(head.spec)
        cpu = torch.device("cpu")
        beside = make_cache(layers, cache.num_blocks, cache.block_tokens, loaded.kv_dtype, cpu)
        vocab = loaded.card.vocab_size
        assert isinstance(loaded.model, DecoderModel)
        draft_model = HeadDrafter(head.model, loaded.model, beside, attention, vocab)
    elif draft is not None:
        beside = new_cache(draft, cache.num_blocks, cache.block_tokens)
        kernels = draft.model.kernels
        own = select_attention(cache.block_tokens, dtype=dtype, kernels=kernels)
        assert not isinstance(draft.model, RowModel)
        draft_model = DraftModel(draft.model, beside, own, loaded.card.vocab_size)
    table = new_table(loaded, adapters) if adapters else None
    return Runner(loaded.model, slots, cache, attention, draft_model=draft_model, adapters=table)
