"""Speed of speculative decoding: the gain on repetitive text, and the cost on other text.

    python -m tests.benchmarks.draft_speed [--turns N] [--heads]

Starts two servers with the default model, one without drafts and one with n-grams, and sends both
the same requests in short turns, so that the load of a shared machine affects both alike. Each pair
of turns gives two ratios: one of elapsed time, and one of the CPU time of all processes of a side,
which does not grow while other programs use the cores. Prints the median and the middle half of
each. Also measures, in one process, the cost of a draft model that is hardly ever right (the model
itself without most of its layers), and the engine's own CPU time for drafts.

With `--heads`, measures only models with heads for multi-token prediction, in one process: a dense
model and a mixture of experts, with random weights, whose heads are always right.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import psutil
import torch
from tokenizers import Tokenizer

from protocol.engine.sampling import SamplingParams
from protocol.engine.stats import EngineStats
from protocol.sdk.client import Client
from tests.support.draft_heads import write_with_head
from tests.support.drafted import replica_of
from tests.support.engine_view import EngineView
from tests.support.engines import Bench, guess_with_accuracy
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.replica import Replica, load, load_own_head
from tests.support.server import Server
from worker.loading.decoder import LoadedModel
from worker.models.decoder import DecoderModel

TURNS = 24
TOKENS = 48
STREAMS = (1, 4)
DRAFT_LAYERS = 2
HEAD_STREAMS = (1, 8)
HEAD_VOCAB = 4096
HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"hidden_size": 768, "intermediate_size": 2048},
    "glm4_moe": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "moe_intermediate_size": 384,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
    },
}
"""Model type -> sizes of its layers: a dense model, and a mixture of experts."""
COMMON = ("--max-len", "1024", "--max-slots", "8", "--poison-slots", "off", "--threads", "1")
COPY = "<|im_start|>user\nRepeat this word for word: {}<|im_end|>\n<|im_start|>assistant\n{}"
TEXT = "The ship left the harbour at dawn, and the gulls went with it as far as the lighthouse. "

Ask = Callable[[list[list[int]], SamplingParams], None]
"""Function that generates the answers to all prompts at the same time."""


@dataclass(frozen=True)
class DraftLoad:
    name: str
    prompts: Callable[[random.Random, int], list[list[int]]]
    params: SamplingParams


@dataclass(frozen=True)
class DraftSide:
    """One of the two sides that are compared: a server, or an engine and worker in this process."""

    ask: Ask
    stats: Callable[[], EngineStats]
    cpu_s: Callable[[], float]


def loads(tokenizer: Tokenizer) -> list[DraftLoad]:
    """Return the two loads: texts to copy, and random tokens, which repeat only by chance."""
    copied = tokenizer.encode(COPY.format(TEXT * 2, TEXT[:30]), add_special_tokens=False).ids
    return [
        DraftLoad(
            "repetitive",
            lambda chance, count: [[chance.randrange(100, 40_000), *copied] for _ in range(count)],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
        ),
        DraftLoad(
            "not repetitive",
            lambda chance, count: [
                [chance.randrange(100, 40_000) for _ in range(100)] for _ in range(count)
            ],
            SamplingParams(temperature=1.3, max_tokens=TOKENS, ignore_eos=True),
        ),
    ]


def compare(
    name: str, load_: DraftLoad, streams: int, turns: int, plain: DraftSide, fast: DraftSide
) -> None:
    """Measure both sides in turns, and print the ratios."""
    chance = random.Random(1)
    took: dict[DraftSide, list[tuple[float, float]]] = {plain: [], fast: []}
    before = plain.stats(), fast.stats()
    for turn in range(turns + 1):  # the first one warms up
        prompts = load_.prompts(chance, streams)
        params = msgspec.structs.replace(load_.params, seed=turn)
        for side in (plain, fast) if turn % 2 else (fast, plain):
            started, busy_s = time.perf_counter(), side.cpu_s()
            side.ask(prompts, params)
            took[side].append((time.perf_counter() - started, side.cpu_s() - busy_s))
    after = plain.stats(), fast.stats()
    steps = [late.num_steps - early.num_steps for early, late in zip(before, after, strict=True)]
    drafts = after[1].num_draft_tokens - before[1].num_draft_tokens
    right = after[1].num_accepted_tokens - before[1].num_accepted_tokens
    by_time, by_cpu = (
        [one[clock] / other[clock] for one, other in zip(took[plain], took[fast], strict=True)][1:]
        for clock in (0, 1)
    )
    assert load_.params.max_tokens is not None
    tokens = turns * streams * load_.params.max_tokens
    speeds = [tokens / sum(elapsed_s for elapsed_s, _ in took[side][1:]) for side in (plain, fast)]
    print(
        f"{name}, {load_.name}, {streams} streams: tokens/s x {_middle(by_time)}, tokens per CPU "
        f"second x {_middle(by_cpu)}; {speeds[0]:.0f} -> {speeds[1]:.0f} tokens/s; "
        f"steps {steps[0]} -> {steps[1]}; {right} of {drafts} drafts right",
        flush=True,
    )


def _middle(ratios: list[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def over_sockets(server: Server, engine: Client) -> DraftSide:
    view = EngineView(server.address)

    def ask(prompts: list[list[int]], params: SamplingParams) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: engine.generate(prompt, params).tokens(), prompts))

    main = psutil.Process(server.process.pid)

    def cpu_s() -> float:
        times = [each.cpu_times() for each in (main, *main.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    return DraftSide(ask, view.stats, cpu_s)


def in_process(replica: Replica) -> DraftSide:
    def ask(prompts: list[list[int]], params: SamplingParams) -> None:
        replica.answers(prompts, params)

    return DraftSide(ask, replica.engine.stats, time.process_time)


def without_most_layers(loaded: LoadedModel) -> LoadedModel:
    """Return the model with only its first DRAFT_LAYERS layers. As a draft model, it is hardly ever
    right."""
    assert isinstance(loaded.model, DecoderModel)
    weights = replace(loaded.model.weights, layers=loaded.model.weights.layers[:DRAFT_LAYERS])
    spec = loaded.model.spec
    config = replace(spec, layers=spec.layers[:DRAFT_LAYERS])
    model = DecoderModel(config, weights)
    return replace(loaded, model=model, spec=config, step_costs=[])


def measure_servers(kinds: Sequence[DraftLoad], turns: int) -> None:
    with (
        Server(*COMMON) as one,
        Server(*COMMON, "--speculation", "ngram") as two,
        Client(one.address) as plain,
        Client(two.address) as fast,
    ):
        sides = over_sockets(one, plain), over_sockets(two, fast)
        for load_ in kinds:
            for streams in STREAMS:
                compare("n-gram", load_, streams, turns, *sides)


def measure_draft_model(loaded: LoadedModel, kinds: Sequence[DraftLoad], turns: int) -> None:
    draft = without_most_layers(loaded)
    cost = num_weights(draft) / num_weights(loaded)
    plain = replica_of(loaded, "none", steps_in_flight=2)
    fast = replica_of(
        loaded, "model", draft=draft, draft_cost=cost, steps_in_flight=2, is_timed=True
    )
    for load_ in kinds:
        for streams in STREAMS:
            name = f"draft model of cost {cost:.2f}"
            compare(name, load_, streams, turns, in_process(plain), in_process(fast))


def measure_heads(turns: int) -> None:
    """Compare models with and without their heads, which are always right. The models are those of
    tests, with larger layers, on one thread."""
    torch.set_num_threads(1)
    load_ = DraftLoad(
        "any text",
        lambda chance, count: [
            [chance.randrange(HEAD_VOCAB) for _ in range(20)] for _ in range(count)
        ],
        SamplingParams(temperature=0, max_tokens=2 * TOKENS, ignore_eos=True),
    )
    for model_type, sizes in HEADS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write_with_head(path, model_type, is_right=True, vocab_size=HEAD_VOCAB, **sizes)
            loaded = load(path, torch.bfloat16, kernels=native_kernels(), weights="packed")
            head = load_own_head(path, loaded)
        cost = head.read_bytes / loaded.card.weights_bytes
        options: dict[str, Any] = {"steps_in_flight": 2, "is_timed": True, "num_blocks": 256}
        plain = replica_of(loaded, "none", **options)
        fast = replica_of(loaded, "mtp", head=head, draft_cost=cost, **options)
        for streams in HEAD_STREAMS:
            name = f"head of cost {cost:.2f}, {model_type}"
            compare(name, load_, streams, turns, in_process(plain), in_process(fast))


def num_weights(loaded: LoadedModel) -> int:
    assert isinstance(loaded.model, DecoderModel)
    return sum(tensor.numel() for tensor in loaded.model.weights.tensors())


def measure_bookkeeping(rows: int = 8, tokens: int = 400) -> None:
    """Print the engine's CPU time per row and step, for answers that never repeat: without drafts,
    with n-grams and with a draft model."""
    for speculation in ("none", "ngram", "model"):
        bench = Bench(
            speculation=speculation,
            guess=guess_with_accuracy(0.0),
            max_len=1000,
            num_blocks=8000,
            steps_in_flight=1,
            max_slots=rows,
        )
        for n in range(rows):
            bench.add([*range(n, 90)], max_tokens=tokens, ignore_eos=True, seed=n)
        spent, num_steps = 0.0, 0
        while True:
            started = time.process_time()
            plan = bench.engine.plan()
            spent += time.process_time() - started
            if plan is None:
                break
            result = bench.worker.execute(plan)
            started = time.process_time()
            bench.engine.commit(result, 0.01)
            spent += time.process_time() - started
            num_steps += 1
        print(f"bookkeeping, {speculation}: {spent / num_steps / rows * 1e6:.1f} us a row and step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.draft_speed")
    parser.add_argument("--turns", type=int, default=TURNS, help="measurements of each setting")
    parser.add_argument("--heads", action="store_true", help="measure models with heads only")
    args = parser.parse_args()
    turns = args.turns
    if args.heads:
        measure_heads(turns)
        return
    measure_bookkeeping()
    loaded = load(smollm2_gguf())
    kinds = loads(Tokenizer.from_buffer(loaded.card.tokenizer))
    measure_servers(kinds, turns)
    measure_draft_model(loaded, kinds, turns)


if __name__ == "__main__":
    main()
