"""The ways in which a prompt and its answer can be computed, all of which give the same bits.

A subject has prompts and their reference answers. For these, each prompt is computed alone and in
one chunk, then one token per step. Each of WAYS computes the same prompts in another way, checks
that it did, and yields the answers. Answers are compared to the last bit: tokens, and the logprobs
of prompt and answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from protocol.config.worker import WorkerConfig
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.sampling import SamplingParams
from protocol.tools.start_facts import GIB
from tests.support.checkpoints import random_llama, write_directory
from tests.support.family_models import random_model
from tests.support.kernels import native_kernels
from tests.support.reference import GOLDEN
from tests.support.replica import Replica, load
from worker.kv.cache import cache_bytes
from worker.loading.decoder import LoadedModel
from worker.lora.adapter import Adapter
from worker.quantize.writing import quantize_model
from worker.spec.kv_blocks import BlockLayers

NUM_TOKENS, BLOCK_TOKENS, MAX_PROMPT = 8, 16, 300
SAMPLED = SamplingParams(
    temperature=0.8, seed=8, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=0
)
REUSING = replace(SAMPLED, prompt_logprobs=None)
"""A request with prompt logprobs computes its whole prompt, so it uses no K/V from elsewhere."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LENGTHS = (MAX_PROMPT, 70, 24, 9, 64, 1, 131, 15, 100, 33, 48, 5, 257, 12, 20, 2)


DENSE = "dense"
INT8 = "int8"
"""Option of a kind of weights: the inputs of the weights are rounded to eight bits."""
KV16 = "kv16"
"""Option: keys and values are rounded to bfloat16."""
KV8 = "kv8"
"""Option: keys and values are rounded to eight bits."""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
"""The rows of each matrix have a multiple of 256 numbers, as K-quants need."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
EXPERTS = {"moe_intermediate_size": 64}
DELTA = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}
GRANITE = {
    "intermediate_size": 64,
    "shared_intermediate_size": 128,
    "mamba_n_heads": 16,
    "mamba_d_state": 32,
}
NEMOTRON = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "moe_shared_expert_intermediate_size": 128,
}
JAMBA = {"mamba_d_state": 16, "mamba_dt_rank": 32}
LATENT = {"num_key_value_heads": 8, "v_head_dim": 32}
OF_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("qwen3_5_moe_text", WIDE | EXPERTS | DELTA),
    "mamba": ("granitemoehybrid", WIDE | GRANITE),
    "conv": ("lfm2_moe", WIDE | EXPERTS),
    "parallel": ("falcon_h1", WIDE | {"mamba_d_ssm": 256, "mamba_n_heads": 8}),
    "single": ("nemotron_h", WIDE | EXPERTS | NEMOTRON),
    "linears between": ("jamba", WIDE | JAMBA),
    "lru": (
        "recurrent_gemma",
        WIDE | {"intermediate_size": 1024, "lru_width": 512, "attention_window_size": 2048},
    ),
    "only mamba": ("falcon_mamba", WIDE | {"state_size": 16, "time_step_rank": 32}),
    "only mamba2": ("mamba2", WIDE | {"head_dim": 32}),
    "kimi": (
        "kimi_linear",
        WIDE | EXPERTS | LATENT | {"linear_num_heads": 8, "linear_head_dim": 32},
    ),
    "latent": ("deepseek_v3", WIDE | EXPERTS | LATENT),
    "selected": ("deepseek_v32", WIDE | EXPERTS | LATENT),
    "shared": ("gemma4_text", WIDE),
    "streams": ("gemma3n_text", WIDE | {"layer_types": ["full_attention"] * 6}),
    "chunks": ("llama4_text", WIDE | {"intermediate_size": 64, "attention_chunk_size": 32}),
    "sparse mixer": ("phimoe", WIDE | {"intermediate_size": 64}),
}
"""Models that one call of the kernels cannot compute: kind -> model type, and fields of its config.
The layers of the first ten are recurrent, and two of these models have no attention. The attention
of "kimi", "latent" and "selected" stores latents, and an indexer selects those of "selected". The
layers of "shared" and "streams" share keys and values. "streams" has no windows, because some ways
need all blocks of a text."""


def small_model(
    folder: Path, kind: str, dtype: torch.dtype, instructions: str | None = None
) -> LoadedModel:
    """Write and load a model with random weights on the compiled kernels.

    kind           of a Llama: a type that `tidegate quantize` writes, or DENSE: numbers of `dtype`.
                   Or one of OF_LAYERS, with numbers of `dtype`. Then options (INT8, KV8), each
                   after a hyphen
    instructions   instruction set of the kernels; None: the best one
    """
    return load_small(write_small(folder, kind, dtype), kind, dtype, instructions)


def write_small(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    """Write the model of `small_model`, and return its path."""
    form = kind.split("-")[0]
    if form in OF_LAYERS:
        model_type, sizes = OF_LAYERS[form]
        model: Any = random_model(model_type, **sizes)
    else:
        model = random_llama(**SHAPE)
    path = write_directory(folder / "numbers", model.to(dtype))
    if form not in (DENSE, *OF_LAYERS):
        source, path = path, folder / "small.gguf"
        quantize_model(source, path, form, lambda *_: None)
    return path


def load_small(
    path: Path, kind: str, dtype: torch.dtype, instructions: str | None = None
) -> LoadedModel:
    """Load what `write_small` has written."""
    options = kind.split("-")[1:]
    return load(
        path,
        dtype,
        kernels=native_kernels(instructions),
        weights="packed",
        activations="int8" if INT8 in options else "bfloat16",
        kv_dtype="int8" if KV8 in options else "bfloat16" if KV16 in options else "auto",
    )


@dataclass(frozen=True)
class BitAnswer:
    """The sampled tokens of a request, their logprobs, and those of its prompt."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    of_prompt: list[TokenLogprobs]


@dataclass(frozen=True)
class Subject:
    """A model, prompts, and their answers when each is computed alone.

    every      ways try only every n-th boundary between blocks, and every n-th step
    adapters   name -> LoRA adapter
    names      name of each prompt's adapter; "": none
    """

    loaded: LoadedModel
    prompts: list[list[int]]
    alone: list[BitAnswer]
    every: int
    adapters: Mapping[str, Adapter]
    names: list[str]

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        num_prompts: int,
        *,
        every: int = 1,
        adapters: Sequence[Adapter] = (),
    ) -> Subject:
        """Compute `num_prompts` prompts, each alone, and return the subject. The last prompt has no
        adapter, and the others have them in turn."""
        chosen = prompts(num_prompts, loaded.spec.vocab_size)
        named = {str(number): adapter for number, adapter in enumerate(adapters)}
        names = [*islice(cycle([*named, ""]), num_prompts - 1), ""]
        subject = cls(loaded, chosen, [], every, named, names)
        replica = subject.replica(max_slots=1, prefix_cache=False)
        subject.alone.extend(
            answer(replica, prompt, adapter=name)
            for prompt, name in zip(chosen, names, strict=True)
        )
        return subject

    def replica(self, **options: Any) -> Replica:
        """Return a replica of the model with all adapters."""
        return Replica(self.loaded, adapters=self.adapters, **options)

    def shortest(self, number: int) -> Subject:
        """Return a subject that has only the `number` shortest prompts."""
        some = slice(-number, None)
        return replaced(
            self, prompts=self.prompts[some], alone=self.alone[some], names=self.names[some]
        )

    def is_same(self, case: BitCase) -> bool:
        """Return whether the answer has the same bits as when the prompt is computed alone.
        Logprobs of the prompt are compared if the case has them."""
        alone, found = self.alone[case.prompt], case.answer
        if found.of_prompt and found.of_prompt != alone.of_prompt:
            return False
        return (found.tokens, found.logprobs) == (alone.tokens, alone.logprobs)


@dataclass(frozen=True)
class BitCase:
    """An answer that a way computed.

    prompt      number of the prompt in the subject
    parameter   the way's parameter, such as its token budget, if any
    """

    prompt: int
    answer: BitAnswer
    parameter: int | None = None


Way = Callable[[Subject, Path], Iterator[BitCase]]
"""Computes the prompts of a subject. It is called with an empty directory of its own."""


def prompts(number: int, vocab_size: int) -> list[list[int]]:
    """Return `number` prompts of different lengths, the longest first: pieces of recorded texts."""
    rows = json.loads(GOLDEN.read_text())
    text = [token % vocab_size for row in rows for token in row["prompt"] + row["tokens"]]
    lengths = sorted((LENGTHS[n % len(LENGTHS)] for n in range(number)), reverse=True)
    starts = [17 * n % (len(text) - MAX_PROMPT) for n in range(number)]
    return [text[start:][:length] for start, length in zip(starts, lengths, strict=True)]


def answer(
    replica: Replica, prompt: Sequence[int], params: SamplingParams = SAMPLED, **fields: Any
) -> BitAnswer:
    """Return the answer to `prompt`, computed as the replica's only request. `fields` are other
    fields of Generate."""
    number = replica.add(prompt, params, **fields)
    replica.run()
    return _answer(replica, number)


def answers(
    replica: Replica, subject: Subject, params: SamplingParams = SAMPLED
) -> Iterator[BitCase]:
    """Compute as many prompts of the subject at once as there are slots, and yield all answers."""
    numbers = [
        replica.add(prompt, params, adapter=name)
        for prompt, name in zip(subject.prompts, subject.names, strict=True)
    ]
    replica.run()
    for prompt, number in enumerate(numbers):
        yield BitCase(prompt, _answer(replica, number))


def _answer(replica: Replica, number: int) -> BitAnswer:
    outputs = replica.outputs[number]
    entries = [entry for output in outputs for entry in output.logprobs]
    of_prompt = [entry for output in outputs for entry in output.prompt_logprobs]
    return BitAnswer(replica.tokens(number), entries, of_prompt)


# ---- Ways.


def in_chunks(budget: int, subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Compute prompts in chunks of `budget` tokens. With a budget of 1, a prompt is computed token
    by token, like an answer."""
    replica = subject.replica(max_slots=1, token_budget=budget, prefix_cache=False)
    for number, prompt in enumerate(subject.prompts):
        yield BitCase(number, answer(replica, prompt, adapter=subject.names[number]), budget)
    assert replica.engine.stats().num_steps >= sum(map(len, subject.prompts)) / budget


def together(subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Compute the prompts and answers of all requests as rows of the same steps."""
    replica = subject.replica(token_budget=100, prefix_cache=False)
    yield from answers(replica, subject)
    assert max(len(step.plan.row_tokens) for step in replica.steps) > 1


def with_other_threads(subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Compute with one and two threads, and with more than this machine may have cores."""
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            yield from answers(subject.replica(prefix_cache=False), subject)
    finally:
        torch.set_num_threads(before)


def from_prefix_cache(subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Continue from a cached prefix that ends at each boundary between blocks in turn."""
    replica = subject.replica(block_tokens=BLOCK_TOKENS, max_slots=1)
    for number, prompt in enumerate(subject.prompts):
        for boundary in range(BLOCK_TOKENS, len(prompt), subject.every * BLOCK_TOKENS):
            space = f"{number}, {boundary}"
            fields = {"namespace": space, "adapter": subject.names[number]}
            answer(replica, prompt[: boundary + 1], GREEDY, **fields)
            yield BitCase(number, answer(replica, prompt, REUSING, **fields), boundary)
            usage = [*replica.outputs.values()][-1][-1].usage
            assert usage is not None
            assert usage.cached_tokens == boundary


def preempted_together(subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Use too few blocks for all requests, so that the youngest are preempted."""
    block_tokens, max_slots = 4, 8
    at_once = subject.prompts[:max_slots]
    num_blocks = sum(len(prompt) // block_tokens + 1 for prompt in at_once) + 2
    replica = subject.replica(max_slots=max_slots, num_blocks=num_blocks, block_tokens=block_tokens)
    yield from answers(replica, subject, REUSING)
    assert replica.engine.stats().num_preemptions


def preempted_at_each_step(subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Preempt each request once: after its first step, in another run after its second, and so on.
    A prompt of at least four tokens is computed in at least four chunks."""
    for number, prompt in enumerate(subject.prompts):
        for at in range(1, NUM_TOKENS + 3, subject.every):
            replica = subject.replica(
                token_budget=max(len(prompt) // 4, 1),
                max_slots=1,
                num_blocks=len(prompt) + NUM_TOKENS + 1,
                block_tokens=1,
                prefix_cache=False,
            )
            request = replica.add(prompt, SAMPLED, adapter=subject.names[number])
            for _ in range(at):
                replica.step()
            if replica.is_ended(request):
                break
            _preempt(replica)
            replica.run()
            yield BitCase(number, _answer(replica, request), at)


def _preempt(replica: Replica) -> None:
    """Allocate all free blocks until the running request is preempted, then release them."""
    pool = replica.engine.scheduler.pool
    taken: list[int] = []
    while not replica.engine.stats().num_preemptions:
        taken += pool.allocate(pool.num_free) or []
        replica.step()
    pool.release(taken)


def with_drafts(kind: str, subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Verify drafts from n-grams, or from the model as its own draft model."""
    replica = subject.replica(
        options={"speculation": kind, "ngram_min": 1},
        draft=subject.loaded if kind == "model" else None,
        prefix_cache=False,
    )
    yield from answers(replica, subject)
    assert replica.engine.stats().num_draft_tokens > 0


def from_another_engine(mover: Any, subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Fetch the K/V of all prompt tokens but the last from another engine, as with --split. The
    states of recurrent layers are fetched at the last boundary between blocks, into checkpoints,
    which only an engine with a prefix cache has."""
    has_states = bool(subject.loaded.spec.state_items)
    address = f"ipc://{folder}/kv"
    exporting = WorkerConfig(model="", kv_export=True, kv_address=address, kv_mover=mover)
    p = subject.replica(token_budget=100, moves=exporting)
    d = subject.replica(moves=WorkerConfig(model="", kv_mover=mover), prefix_cache=has_states)
    counts = [len(prompt) - 1 for prompt in subject.prompts]
    if has_states:
        counts = [count // BLOCK_TOKENS * BLOCK_TOKENS for count in counts]
    with closing(p), closing(d):
        for number, prompt in enumerate(subject.prompts):
            if counts[number]:
                name = subject.names[number]
                answer(p, prompt, GREEDY, kv_readers=1, adapter=name)
                handle = [*p.outputs.values()][-1][-1].kv_handle
                found = answer(d, prompt, REUSING, kv_handle=handle, adapter=name)
                yield BitCase(number, found)
                p.receive_report()
        fetched = d.engine.stats().num_fetched_tokens
        assert fetched == sum(counts)


def from_tier(tier: str, subject: Subject, folder: Path) -> Iterator[BitCase]:
    """Store the blocks of each prompt when it is first computed, and load them later: from host
    memory after the cache has lost them, from disk by another engine."""
    num_blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in subject.prompts)
    if tier == "disk":
        moves = WorkerConfig(model="", kv_disk=str(folder))
    else:
        of_blocks = num_blocks * _block_bytes(subject)
        num_bytes = of_blocks + len(subject.prompts) * _state_bytes(subject)
        moves = WorkerConfig(model="", kv_host_gib=2 * num_bytes / GIB)
    new_replica = partial(
        subject.replica,
        block_tokens=BLOCK_TOKENS,
        options={"kv_load_tokens": 1},
        moves=moves,
    )
    replica = new_replica()
    for number, prompt in enumerate(subject.prompts):
        answer(replica, prompt, GREEDY, namespace=str(number), adapter=subject.names[number])
    if tier == "disk":
        replica.close()
        replica = new_replica()
    else:
        _await_stored(replica, tier, num_blocks)
        pool = replica.engine.scheduler.pool
        pool.release(pool.allocate(pool.num_free) or [])
    with closing(replica):
        for number, prompt in enumerate(subject.prompts):
            found = answer(
                replica, prompt, REUSING, namespace=str(number), adapter=subject.names[number]
            )
            usage = [*replica.outputs.values()][-1][-1].usage
            assert usage is not None
            assert usage.cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            yield BitCase(number, found)


def _block_bytes(subject: Subject) -> int:
    layers = BlockLayers.of(subject.loaded.spec)
    return cache_bytes(layers, 1, BLOCK_TOKENS, subject.loaded.kv_dtype)


def _state_bytes(subject: Subject) -> int:
    return subject.loaded.spec.state_items * torch.float32.itemsize


def _await_stored(replica: Replica, tier: str, num_blocks: int) -> None:
    assert replica.transfers is not None
    while replica.engine.stats().tier_blocks.get(tier, 0) < num_blocks:
        replica.transfers.wait()
        replica.receive_report()


WAYS: dict[str, Way] = {
    "chunks of 1": partial(in_chunks, 1),
    "chunks of 7": partial(in_chunks, 7),
    "chunks of 64": partial(in_chunks, 64),
    "in a batch": together,
    "other threads": with_other_threads,
    "cached prefix": from_prefix_cache,
    "preempted": preempted_together,
    "preempted at each step": preempted_at_each_step,
    "n-gram drafts": partial(with_drafts, "ngram"),
    "model drafts": partial(with_drafts, "model"),
    "fetched by shm": partial(from_another_engine, "shm"),
    "fetched by zmq": partial(from_another_engine, "zmq"),
    "host tier": partial(from_tier, "host"),
    "disk tier": partial(from_tier, "disk"),
}
"""Name -> way."""


def ways_for(loaded: LoadedModel, ways: Sequence[str]) -> list[str]:
    """Return those of `ways` in which the model can be computed. A model with recurrent layers
    cannot be a draft model."""
    return [way for way in ways if way != "model drafts" or not loaded.spec.state_items]
