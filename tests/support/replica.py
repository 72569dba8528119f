"""A whole replica in one process: the real engine and the real worker's runner, without sockets.

For tests of what is computed: which tokens, in which batches, with which blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from engine_core.engine import Engine
from engine_core.grammar.book import Compiled
from engine_core.grammar.compiler import Compiler
from protocol.arrays import Int32
from protocol.config import EngineConfig, WorkerConfig
from protocol.grammar import Grammar
from protocol.messages import Accepted, Generate, Limits, Output
from protocol.sampling import SamplingParams
from protocol.steps import StepPlan
from worker.attention.select import select_attention
from worker.kv_cache import KVCache
from worker.models.load import LoadedModel, load_model
from worker.runner import Runner
from worker.slot_fields import slot_fields
from worker.slots import SlotTable

CLIENT = b"test"


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype, device=torch.device("cpu"))


@dataclass
class Replica:
    """`run` computes all that was added; `outputs[n]` is what came of request n."""

    loaded: LoadedModel
    token_budget: int = 512
    max_slots: int = 16
    num_blocks: int = 1024
    block_tokens: int = 16
    prefix_cache: bool = True
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.loaded.config
        max_len = min(config.context_tokens, (self.num_blocks - 1) * self.block_tokens)
        limits = Limits(
            max_len=max_len,
            max_slots=self.max_slots,
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
        )
        device, dtype = torch.device("cpu"), getattr(torch, self.loaded.card.dtype)
        cache = KVCache(
            config.num_layers,
            self.num_blocks,
            self.block_tokens,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
        )
        fields = slot_fields(max_len, -(-max_len // self.block_tokens))
        attention = select_attention(self.block_tokens, dtype=dtype)
        slots = SlotTable(fields, self.max_slots, device)
        self.runner = Runner(self.loaded.model, slots, cache, attention)
        self.engine = Engine(EngineConfig(worker=WorkerConfig(model="")), self.loaded.card, limits)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None = None
    ) -> int:
        number = len(self.outputs)
        message = Generate(request=number, prompt=Int32.of(prompt), params=params, grammar=grammar)
        reply = self.engine.add(CLIENT, message)
        for job in self.engine.take_jobs():
            compiled = Compiled(job.digest, self.compiler.compile(job.grammar))
            ((_, reply),) = self.engine.settle(compiled)
        assert reply == Accepted(request=number)
        self.outputs[number] = []
        return number

    @cached_property
    def compiler(self) -> Compiler:
        return Compiler(self.loaded.card)

    def run(self) -> None:
        while (plan := self.engine.plan()) is not None:
            self.plans.append(plan)
            result = self.runner.step(plan, self.engine.masks)
            for news in self.engine.commit(result, result.compute_s).values():
                for output in news.outputs:
                    self.outputs[output.request].append(output)
        self.engine.check()

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def answers(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """All at once, as far as there are slots."""
        numbers = [self.add(prompt, params) for prompt in prompts]
        self.run()
        return [self.tokens(number) for number in numbers]
