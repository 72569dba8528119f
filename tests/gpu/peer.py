"""Times transformers' continuous batching with a random model of Qwen3-8B's shape, for comparison
with our server (serving.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from tests.gpu.serving import PROMPT, RESULT, STREAMS
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, figure, not_run

ANSWER = 64
"""Tokens of each answer: fewer than in serving.py, to take less time. Per second there are as
many."""
TIMES_FASTER = 5.0


def measure_transformers(session: GpuSession) -> Iterator[GpuRow]:
    if find_spec("transformers") is None:
        raise NotPossible("transformers is not installed")
    rate = _tokens_per_s(session)
    yield figure("transformers' continuous batching", rate, "tokens/s")
    file, name = session.folder / RESULT, "our server beside it"
    if not file.exists():
        yield not_run(name, "the stage `serving` has no result")
        return
    ours = json.loads(file.read_text())["output_tokens_per_s"]
    yield figure(name, ours / rate, "times as fast", at_least=TIMES_FASTER)


def _tokens_per_s(session: GpuSession) -> float:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    fields = json.loads(session.config("qwen3-8b").read_text())
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = session.choose(torch.bfloat16, torch.float32)
    with torch.device(session.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    streams, prompt, answer = session.choose((STREAMS, PROMPT, ANSWER), (2, 8, 2))
    vocab = config.vocab_size
    prompts = torch.randint(1, vocab, (streams, prompt)).tolist()
    options = GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    if not session.is_rehearsal:
        model.generate_batch(prompts[:8], generation_config=options)  # compiles kernels
    started = perf_counter()
    # By default its cache and its masks take most of the memory of the machine.
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    answers = model.generate_batch(
        prompts,
        generation_config=options,
        continuous_batching_config=session.choose(None, small),
        warmup=False,
    )
    seconds = perf_counter() - started
    num_tokens = sum(len(each.generated_tokens) for each in answers.values())
    if num_tokens != streams * answer:
        raise RuntimeError(f"{num_tokens} tokens instead of {streams * answer}")
    return num_tokens / seconds
