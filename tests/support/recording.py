"""A recorded stream of plans that mixes all kinds of requests, and its replay by other workers.

`record` runs two hundred requests through a real engine and a real worker, with two steps in
flight. Some requests continue from prompts that another engine and worker have computed.
`own_slots` rewrites the stream so that each binding has a slot that was never used before. `replay`
executes a stream with a new worker.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from msgspec.structs import replace as changed

from protocol.engine.grammar import Body, ChoiceGrammar, Grammar, Regex
from protocol.engine.messages import Output
from protocol.engine.sampling import DryBreaker, SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepResult
from tests.support.adapters import random_adapter
from tests.support.grammars import EOS, signs_tokenizer
from tests.support.handover import KVNetwork
from tests.support.replica import Executed, Replica, load, new_cache, new_runner, slot_table
from tests.support.tiny_checkpoint import VOCAB, write_tiny_llama
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel
from worker.lora.adapter import Adapter
from worker.slots.table import SlotTable
from worker.step.slot_registry import Poison

BLOCK_TOKENS = 4
NUM_BLOCKS = 33
MAX_SLOTS = 7
MAX_LEN = 64
TOKEN_BUDGET = 24
NUM_REQUESTS = 200
FETCH_STEPS = 2
"""A fetch ends every FETCH_STEPS steps."""
FAILURE_STEPS = 16
"""A fetch fails every FAILURE_STEPS steps."""

GREEDY = SamplingParams(temperature=0.0)
KINDS: list[tuple[SamplingParams, Body | None]] = [
    (GREEDY, None),
    (SamplingParams(temperature=0.9), None),
    (SamplingParams(temperature=1.6, top_k=3, seed=-5), None),
    (SamplingParams(temperature=1.9, top_p=0.4), None),
    (SamplingParams(temperature=1.8, min_p=0.3, seed=1 << 62), None),
    (SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02), None),
    (SamplingParams(temperature=0.0, repetition_penalty=4.0), None),
    (SamplingParams(temperature=0.0, frequency_penalty=1.9), None),
    (SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=-2.0), None),
    (SamplingParams(temperature=0.0, logit_bias={i: 3.0 + i / 64 for i in range(5, 90, 17)}), None),
    (SamplingParams(temperature=1.0, logit_bias={3: 6.0, 50: 5.5}, logprobs=2), None),
    (SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[*range(90)]), None),
    (SamplingParams(temperature=0.7, min_tokens=3, stop_token_ids=[7, 9], logprobs=5), None),
    (SamplingParams(temperature=0.0, min_tokens=4, ignore_eos=True), None),
    (SamplingParams(temperature=0.7, logprobs=5, prompt_logprobs=3), None),
    (SamplingParams(temperature=0.0, prompt_logprobs=0, min_tokens=4, ignore_eos=True), None),
    (SamplingParams(temperature=0.0, allowed_token_ids=list(range(2, 97, 5))), None),
    (SamplingParams(bad_words=[[i] for i in range(0, 97, 4)] + [[1, 3], [5] * 4]), None),
    (SamplingParams(temperature=0.0, bad_words=[[i, j] for i in range(9) for j in range(9)]), None),
    (
        SamplingParams(
            temperature=1.5,
            logprobs=1,
            logprob_token_ids=[60, 4, 33],
            mirostat=2,
            mirostat_tau=2.5,
            mirostat_eta=0.7,
        ),
        None,
    ),
    (SamplingParams(temperature=0.0, logprob_token_ids=[96], min_tokens=4, ignore_eos=True), None),
    (SamplingParams(temperature=1.2, top_k=9, logprobs=4, logprobs_of="sampling"), None),
    (
        SamplingParams(
            temperature=1.4, top_p=0.6, logprob_token_ids=[7, 8], logprobs=2, logprobs_of="both"
        ),
        None,
    ),
    (SamplingParams(temperature=1.5, typical_p=0.4, logprobs=3, logprobs_of="both"), None),
    (SamplingParams(temperature=1.9, top_n_sigma=0.8, top_k=60), None),
    (SamplingParams(dynatemp_range=1.0, dynatemp_exponent=0.3, xtc_probability=0.8), None),
    (
        SamplingParams(
            temperature=1.5,
            dynatemp_range=0.7,
            xtc_probability=0.6,
            xtc_threshold=0.02,
            min_p=0.01,
        ),
        None,
    ),
    (SamplingParams(temperature=2.0, top_k=30, min_p=0.2, samplers=["min_p", "temperature"]), None),
    (
        SamplingParams(
            dry_multiplier=0.2, allowed_token_ids=[3, 4, 5], logprobs=3, logprobs_of="sampling"
        ),
        None,
    ),
    (
        SamplingParams(
            temperature=0.1,
            logprobs=5,
            logprobs_of="sampling",
            dry_multiplier=0.05,  # so the answer repeats tokens, and logprobs show the penalty
            dry_base=1.5,
            dry_allowed_length=0,
            dry_penalty_last_n=9,
            dry_breakers=[
                DryBreaker([*range(0, 97, 9)]),
                *(DryBreaker([*range(97)], [token]) for token in range(0, 97, 2)),
            ],
        ),
        None,
    ),
    (GREEDY, Regex(pattern="[ab]{2,9}c")),
    (SamplingParams(temperature=1.5, logprobs=2, logprobs_of="sampling"), Regex(pattern="(no)+")),
    (SamplingParams(temperature=1.0, seed=3), ChoiceGrammar(choices=["abc", "abd", "xyzzy"])),
]
"""(params, grammar). In each row, the answer depends on different fields of the slot."""


@dataclass(frozen=True)
class RecordedRequest:
    """A request, the number of steps after which it arrives, and the number of further steps after
    which it is aborted (None: it is not).

    prefilled   whether another engine computes its prompt
    adapter     name of its LoRA adapter; "": none
    """

    prompt: list[int]
    params: SamplingParams
    grammar: Grammar | None
    arrives: int
    abort_after: int | None
    prefilled: bool
    adapter: str = ""


@dataclass
class Recording:
    """The executed steps, and the outputs of each request, by number.

    draft   the draft model; None: drafts are n-grams
    """

    loaded: LoadedModel
    draft: LoadedModel | None
    adapters: Mapping[str, Adapter]
    steps: list[Executed]
    outputs: dict[int, list[Output]]
    num_aborted_in_flight: int


def tiny_model(folder: Path, seed: int = 3) -> LoadedModel:
    """Write and load a Llama with random weights, whose tokens are single characters."""
    write_tiny_llama(folder, seed, eos_token_id=EOS)
    (folder / "tokenizer.json").write_bytes(signs_tokenizer(markers=False))
    return load(folder)


def make_requests(
    seed: int, count: int = NUM_REQUESTS, adapters: Sequence[str] = ("",)
) -> list[RecordedRequest]:
    """Return requests of all kinds. Each prompt begins like one of three conversations. So the
    prefix cache has a part of many prompts, and all but the last token of some.

    adapters   LoRA adapters of the requests, in turn, four for each; "": none
    """
    chance = random.Random(seed)
    talks = [[chance.randrange(1, VOCAB) for _ in range(48)] for _ in range(3)]
    requests = []
    for number in range(count):
        params, body = KINDS[number % len(KINDS)]
        shared = 0 if chance.random() < 0.3 else BLOCK_TOKENS * chance.randrange(1, 11)
        fresh = chance.choice((0, 0, chance.randrange(9)))
        prompt = chance.choice(talks)[: shared + 1]
        prompt += [chance.randrange(1, VOCAB) for _ in range(fresh)]
        requests.append(
            RecordedRequest(
                prompt=prompt,
                params=changed(params, max_tokens=chance.randrange(4, 18)),
                grammar=None if body is None else Grammar(body=body),
                arrives=number // 2,
                abort_after=chance.randrange(1, 7) if chance.random() < 0.25 else None,
                prefilled=number % 2 == 1 and len(prompt) > 1,
                adapter=adapters[number // 4 % len(adapters)],
            )
        )
    return requests


def record(
    loaded: LoadedModel,
    requests: Iterable[RecordedRequest],
    *,
    steps_in_flight: int = 2,
    draft: LoadedModel | None = None,
) -> Recording:
    """Serve the requests and record the steps. Requests are aborted while as many steps as possible
    are in flight."""
    air = KVNetwork()
    waiting, abort_steps, num_aborted = list(requests), {}, 0
    names = sorted({each.adapter for each in waiting} - {""})
    adapters = {
        name: random_adapter(loaded, seed=seed, rank=4 + seed) for seed, name in enumerate(names)
    }
    elsewhere = Replica(loaded, block_tokens=BLOCK_TOKENS, place=air.member("p"), adapters=adapters)
    replica = Replica(
        loaded,
        token_budget=TOKEN_BUDGET,
        max_slots=MAX_SLOTS,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        max_len=MAX_LEN,
        steps_in_flight=steps_in_flight,
        options={
            "speculation": "ngram" if draft is None else "model",
            "ngram_min": 1,
            "max_drafts": 4,
        },
        draft=draft,
        adapters=adapters,
        place=air.member("d"),
    )
    for step in range(100_000):
        while waiting and waiting[0].arrives <= step:
            one = waiting.pop(0)
            handle = _prefill(elsewhere, one) if one.prefilled else ""
            number = replica.add(
                one.prompt, one.params, one.grammar, kv_handle=handle, adapter=one.adapter
            )
            if one.abort_after is not None:
                abort_steps[number] = step + one.abort_after
        replica.plan()
        for number in [number for number, at in abort_steps.items() if at <= step]:
            del abort_steps[number]
            if not replica.is_ended(number):
                replica.abort(number)
                num_aborted += len(replica.out) == steps_in_flight
        if step % FETCH_STEPS == 0:
            replica.move("damaged" if step % FAILURE_STEPS == 0 else "")
        if not replica.step() and not waiting and replica.engine.is_idle:
            break
    replica.engine.check()
    return Recording(loaded, draft, adapters, replica.steps, replica.outputs, num_aborted)


def _prefill(elsewhere: Replica, one: RecordedRequest) -> str:
    """Return the handle of a prompt that another replica has computed."""
    number = elsewhere.add(one.prompt, GREEDY, kv_readers=1, adapter=one.adapter)
    elsewhere.run()
    return elsewhere.outputs[number][-1].kv_handle


def num_bindings(steps: Iterable[Executed]) -> int:
    return sum(len(step.plan.bind) for step in steps)


def own_slots(steps: Iterable[Executed]) -> list[Executed]:
    """Return the same steps with a slot of its own for every binding."""
    new_slots: dict[int, int] = {}
    num_slots, rewritten = 0, []
    for step in steps:
        plan = step.plan
        release = [
            changed(released, slot=new_slots.pop(released.slot)) for released in plan.release
        ]
        bind = []
        for init in plan.bind:
            new_slots[init.slot] = num_slots
            bind.append(changed(init, slot=num_slots))
            num_slots += 1
        plan = changed(
            plan,
            release=release,
            bind=bind,
            block_slots=Int32.of(new_slots[slot] for slot in plan.block_slots.tolist()),
            row_slots=Int32.of(new_slots[slot] for slot in plan.row_slots.tolist()),
        )
        rewritten.append(replace(step, plan=plan))
    return rewritten


def without_time(result: StepResult) -> StepResult:
    """Return `result` without its compute time, so that results of two runs can be compared."""
    return changed(result, compute_s=0.0)


def replay(
    recorded: Recording,
    steps: Iterable[Executed],
    *,
    max_slots: int = MAX_SLOTS,
    poison: Poison | None = None,
    block_poison: float | None = None,
    zeroes: bool = True,
    kind: type[SlotTable] = SlotTable,
) -> Iterator[StepResult]:
    """Yield the results of a new worker for the same plans and masks, step by step.

    block_poison   written into a block before it gets new content
    zeroes         whether the blocks that a plan names are then zeroed
    """
    slots = slot_table(MAX_LEN, BLOCK_TOKENS, max_slots, poison=poison, kind=kind)
    cache = new_cache(recorded.loaded, NUM_BLOCKS, BLOCK_TOKENS)
    runner = new_runner(
        recorded.loaded, slots, cache, recorded.draft, [*recorded.adapters.values()]
    )
    caches = [cache] if runner.draft_model is None else [cache, runner.draft_model.cache]
    for step in steps:
        taken = [*step.plan.zero_blocks.tolist(), *chain(*(each.blocks for each in step.arrived))]
        if block_poison is not None:
            for each in caches:
                assert isinstance(each, KVCache)
                each.k[:, taken] = each.v[:, taken] = block_poison
        for arrived in step.arrived:
            runner.zero_draft_blocks(Int32.of(arrived.blocks))
            arrived.write(cache)
        plan = step.plan if zeroes else changed(step.plan, zero_blocks=Int32.of([]))
        yield without_time(runner.step(plan, partial(getattr, step, "masks")))
