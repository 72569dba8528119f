"""A plain decode step in one compiled call gives the results of the general path, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from protocol.engine.attachments import Attachment
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import Masks, StepPlan, StepResult
from tests.support.checkpoints import VOCAB, random_llama, write_directory
from tests.support.kept_hidden import KeptHidden
from tests.support.kernels import NAMES, native_kernels
from tests.support.plans import GREEDY, slot_init, step_plan
from worker.attention.select import select_attention
from worker.kernels.native import NativeKernels
from worker.kv.cache import KVCache
from worker.layers.embedding import DenseEmbedding
from worker.loading.decoder import load_model
from worker.models.decoder import DecoderModel
from worker.slots.fields import slot_fields
from worker.step.runner import Runner
from worker.step.slot_registry import PoisonedSlots

CPU = torch.device("cpu")
MAX_LEN, BLOCK_TOKENS, SLOTS, BLOCKS_EACH = 40, 4, 6, 10
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, logprobs=2)
PLAIN = SamplingParams(temperature=0.9, top_p=0.9)
PENALISED = SamplingParams(
    temperature=0.4, frequency_penalty=0.5, repetition_penalty=1.2, min_p=0.1
)
BENT = SamplingParams(temperature=0.4, repetition_penalty=1.4, logprobs=1, logprobs_of="both")


class InPieces:
    """A model without its whole-pass kernel, so that the runner uses the general path."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.logits = model.logits

    def __call__(self, *args: Any) -> Tensor:
        return self._model(*args)


def runner_of(model: DecoderModel, dtype: torch.dtype, *, in_pieces: bool) -> Runner:
    config = model.spec
    shape = (config.num_layers, 1 + SLOTS * BLOCKS_EACH, BLOCK_TOKENS, config.layer_heads[0].count)
    cache = KVCache(*shape, config.layer_heads[0].dim, dtype, CPU)
    fields = slot_fields(MAX_LEN, BLOCKS_EACH, has_rope_axes=config.has_rope_axes)
    slots = PoisonedSlots(fields, SLOTS, CPU)
    attention = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=model.kernels)
    whole: Any = InPieces(model) if in_pieces else model
    return Runner(whole, slots, cache, attention)


def prompt_of(slot: int) -> list[int]:
    return [(31 * slot + 7 * at) % VOCAB for at in range(2 + 5 * slot)]


def first_step(params: Sequence[SamplingParams]) -> StepPlan:
    """Return a plan with prompts of several lengths, so that rows are at different offsets in their
    blocks."""
    inits = [
        slot_init(
            slot,
            prompt_of(slot),
            blocks=range(1 + slot * BLOCKS_EACH, 1 + (slot + 1) * BLOCKS_EACH),
            seed=slot,
            stop_ids=[3],
            params=each,
        )
        for slot, each in enumerate(params)
    ]
    return step_plan(bind=inits, rows=[(s, 0, len(prompt_of(s)), True) for s in range(len(inits))])


def plain_step(number: int, slots: Sequence[int], **more: Any) -> StepPlan:
    """Return the plan of the `number`-th decode step after the first step."""
    rows = [(slot, len(prompt_of(slot)) + number - 1, 1, True) for slot in slots]
    return step_plan(number, rows=rows, **more)


def fields_of(result: StepResult) -> list[object]:
    """Return all fields of the result except its time."""
    return [getattr(result, name) for name in result.__struct_fields__ if name != "compute_s"]


def load(folder: Path, kernels: NativeKernels, dtype: torch.dtype) -> DecoderModel:
    model = load_model(folder, dtype=dtype, device=CPU, kernels=kernels, weights="packed").model
    assert isinstance(model, DecoderModel)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model in which tokens t and t + 160 are equally likely. The lower id
    must be chosen."""
    model = random_llama()
    with torch.no_grad():
        model.lm_head.weight[VOCAB // 2 :] = model.lm_head.weight[: VOCAB // 2]
    return write_directory(tmp_path_factory.mktemp("llama"), model)


def both_runners(
    model: DecoderModel, dtype: torch.dtype, params: Sequence[SamplingParams]
) -> list[Runner]:
    runners = [runner_of(model, dtype, in_pieces=in_pieces) for in_pieces in (False, True)]
    for runner in runners:
        runner.step(first_step(params))
    return runners


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        [GREEDY] * 4,
        [GREEDY, DRAWN, BENT, DRAWN],
        [DRAWN],
        [PENALISED, PLAIN, GREEDY, PENALISED],
    ],
    ids=["greedy", "mixed", "one that draws", "chosen in the call"],
)
def test_one_call_equals_the_general_path_in_results_slots_and_cache(
    folder: Path, name: str, dtype: torch.dtype, params: list[SamplingParams]
) -> None:
    model = load(folder, native_kernels(name), dtype)
    one, other = both_runners(model, dtype, params)
    slots = list(range(len(params)))
    for step in range(1, 7):
        plan = plain_step(step, slots[::-1])
        assert fields_of(one.step(plan)) == fields_of(other.step(plan))
    for key in ("token_ids", "len"):
        assert torch.equal(one.components.slots[key], other.components.slots[key])
    assert torch.equal(one.components.cache.rows, other.components.cache.rows)


def test_one_call_turns_what_is_after_an_image_as_the_general_path_does(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    directory = write_directory(tmp_path, random_llama(rope_parameters=rope))
    model = load(directory, native_kernels(), torch.float32)
    image = Attachment(digest="0f" * 32, kind="image", runs=[(1, 6)], grid=(1, 2, 3))

    def cache_after(images: list[Attachment], *, in_pieces: bool) -> Tensor:
        """Return the cache after some steps with a row with `images`, and one without any."""
        runner = runner_of(model, torch.float32, in_pieces=in_pieces)
        plan = first_step([GREEDY] * 3)
        text, after = plan.bind[1], replace(plan.bind[2], images=images, num_computed=7)
        rows = [(1, 0, len(text.tokens), True), (2, 7, len(after.tokens) - 7, True)]
        runner.step(step_plan(bind=[text, after], rows=rows))
        for step in range(1, 5):
            runner.step(plain_step(step, [2, 1]))
        return runner.components.cache.rows

    caches = [cache_after([image], in_pieces=in_pieces) for in_pieces in (False, True)]
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], cache_after([], in_pieces=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_has_the_hidden_states_of_the_general_path(
    folder: Path, dtype: torch.dtype
) -> None:
    model = load(folder, native_kernels(), dtype)
    kept = []
    for runner in both_runners(model, dtype, [GREEDY, DRAWN]):
        runner.draft_model = proposer = KeptHidden(runner.components.cache)
        for step in range(1, 4):
            runner.step(plain_step(step, [1, 0]))
        kept.append(torch.cat(proposer.kept).float())
    assert torch.equal(*kept)


def test_the_first_of_equally_likely_tokens_is_chosen(folder: Path) -> None:
    model = load(folder, native_kernels(), torch.float32)
    runner = runner_of(model, torch.float32, in_pieces=False)
    runner.step(first_step([GREEDY] * 4))
    tokens = [t for n in range(1, 9) for t in runner.step(plain_step(n, range(4))).tokens.tolist()]
    assert max(tokens) < VOCAB // 2


def test_a_row_with_non_finite_logits_fails_alone(folder: Path) -> None:
    model = load(folder, native_kernels(), torch.float32)
    runners = both_runners(model, torch.float32, [GREEDY] * 3)
    bad = int(runners[0].components.slots["token_ids"][1, len(prompt_of(1))])
    embedding = model.weights.embedding
    assert isinstance(embedding, DenseEmbedding)
    with torch.inference_mode():
        embedding.weight[bad] = float("nan")
    results = [runner.step(plain_step(1, range(3))) for runner in runners]
    assert fields_of(results[0]) == fields_of(results[1])
    assert 1 in results[0].failed.tolist()
    assert results[0].tokens.tolist()[1] == 0


def test_masks_apply_in_a_plain_step(folder: Path) -> None:
    model = load(folder, native_kernels(), torch.float32)
    one, other = both_runners(model, torch.float32, [GREEDY] * 2)
    bits = [0] * (VOCAB // 32)
    bits[200 // 32] = 1 << 200 % 32
    plan = plain_step(1, range(2), masked=[1])
    masks = Masks(step=1, bits=Int32.of(bits, (1, len(bits))))
    results = [runner.step(plan, lambda: masks) for runner in (one, other)]
    assert fields_of(results[0]) == fields_of(results[1])
    assert results[0].tokens.tolist()[1] == 200


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((SLOTS, 1, 1, True), "slot is outside the 6 slots"),
        ((-1, 1, 1, True), "slot is outside the 6 slots"),
        ((0, MAX_LEN - 1, 1, True), "exceeds 40 tokens"),
        ((0, -1, 1, True), "exceeds 40 tokens"),
        ((0, 20, 1, True), "slot 0 holds a token outside the vocabulary of 320"),
    ],
)
def test_a_row_outside_its_slot_is_refused(
    folder: Path, row: tuple[int, int, int, bool], message: str
) -> None:
    """In the last case, the row starts after the slot's known tokens, where the slot has poison."""
    runner = runner_of(
        load(folder, native_kernels(), torch.float32), torch.float32, in_pieces=False
    )
    runner.step(first_step([GREEDY]))
    with pytest.raises(ValueError, match=message):
        runner.step(step_plan(1, rows=[row]))
