"""Answers about images are those of transformers, however the engine schedules them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import AttachedTensor, Attachment, attachment_digest
from tests.support.checkpoints import VOCAB
from tests.support.eager import some_tokens
from tests.support.image_engine import ImageEngine, attached, reference
from tests.support.wrapper_models import random_wrapper, write_wrapper
from tools.commands.models import memory_line
from worker.device import device
from worker.startup.preflight import preflight
from worker.vision.tower import ImageTower

ARCHITECTURES = {
    "SmolVLMForConditionalGeneration": "llama",
    "Idefics3ForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
}
PLACEHOLDER = VOCAB - 1
NUM_TOKENS = 5
Arrays = dict[str, np.ndarray[Any, Any]]


def image_inputs(architecture: str, seed: int) -> Arrays:
    """Return what the family's image processor would return for one image."""
    pixels = np.random.default_rng(seed).normal(size=(1, 3, 3, 28, 28)).astype(np.float32)
    if architecture.startswith("LlavaOnevision"):
        return {"pixel_values": pixels, "image_sizes": np.array([[28, 56]], np.int64)}
    if architecture.startswith("Mistral3"):
        wide = np.random.default_rng(seed).normal(size=(1, 3, 56, 84)).astype(np.float32)
        return {"pixel_values": wide, "image_sizes": np.array([[56, 84]], np.int64)}
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": np.ones((1, 3, 28, 28), np.int64),
    }


@dataclass
class TinyVision:
    """A tiny model, its directory, and an engine that serves it."""

    architecture: str
    model: Any
    directory: Path
    num_rows: int

    def inputs(self, *seeds: int) -> dict[str, torch.Tensor]:
        """Return the inputs of transformers' model for images with these seeds."""
        each = [image_inputs(self.architecture, seed) for seed in seeds]
        axis = 1 if "pixel_attention_mask" in each[0] else 0
        return {
            name: torch.from_numpy(np.concatenate([image[name] for image in each], axis))
            for name in each[0]
        }

    def tensors(self, seed: int) -> list[AttachedTensor]:
        return attached(image_inputs(self.architecture, seed))


@lru_cache
def family(architecture: str, directory: Path) -> TinyVision:
    model = random_wrapper(architecture, ARCHITECTURES[architecture])
    if hasattr(model.config, "image_grid_pinpoints"):
        model.config.image_grid_pinpoints = [[28, 56], [56, 28]]
    made = model.model.get_image_features(
        **{name: torch.from_numpy(array) for name, array in image_inputs(architecture, 0).items()}
    )
    rows = made.pooler_output
    num_rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in rows)
    return TinyVision(architecture, model, write_wrapper(directory, model), num_rows)


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


@pytest.fixture(params=ARCHITECTURES, scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return family(request.param, tmp_path_factory.getbasetemp() / request.param)


def text(count: int, seed: int) -> list[int]:
    return [token for token in some_tokens(count, seed) if token != PLACEHOLDER]


def prompt_with(tiny: TinyVision, *lengths: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a prompt with an image between each two texts of these lengths, and its runs."""
    prompt, runs = text(lengths[0], 1), []
    for number, length in enumerate(lengths[1:]):
        runs.append((len(prompt), tiny.num_rows))
        prompt += [PLACEHOLDER] * tiny.num_rows + text(length, 2 + number)
    return prompt, runs


def attach(engine: ImageEngine, tiny: TinyVision, runs: Any, seeds: Any) -> list[Attachment]:
    pairs = zip(runs, seeds, strict=True)
    return [engine.attach(tiny.tensors(seed), run) for run, seed in pairs]


def check(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert abs(ours - theirs) < 1e-4


LENGTHS = [(0, 6), (5, 6), (5, 4, 6), (5, 1, 0, 3)]
"""Lengths of the texts around the images: an image first, between texts, several, and beside each
other."""


def ask(
    engine: ImageEngine,
    tiny: TinyVision,
    *lengths: int,
    first: int = 0,
    num_tokens: int = NUM_TOKENS,
) -> int:
    """Add a request with images whose seeds are `first` and those after it."""
    prompt, runs = prompt_with(tiny, *lengths)
    images = attach(engine, tiny, runs, range(first, first + len(runs)))
    return engine.add(prompt, images, max_tokens=num_tokens, logprobs=0)


def answer_of(
    tiny: TinyVision, *lengths: int, first: int = 0, num_tokens: int = NUM_TOKENS
) -> list[tuple[int, float]]:
    """Return the answer of transformers' model."""
    prompt, runs = prompt_with(tiny, *lengths)
    inputs = tiny.inputs(*range(first, first + len(runs)))
    return reference(tiny.model, prompt, num_tokens, **inputs)


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 512])
def test_an_answer_is_that_of_transformers_wherever_chunks_end(
    tiny: TinyVision, budget: int
) -> None:
    """With these budgets, a chunk ends at each position of an image."""
    engine = ImageEngine(tiny.directory, token_budget=budget)
    for lengths in LENGTHS if budget == 512 else LENGTHS[2:3]:
        number = ask(engine, tiny, *lengths)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *lengths))


def test_texts_and_images_are_computed_in_one_batch(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory, token_budget=11)
    words = text(20, 9)
    asked = [ask(engine, tiny, *LENGTHS[2]), ask(engine, tiny, *LENGTHS[1], first=7)]
    plain = engine.add(words, [], max_tokens=NUM_TOKENS, logprobs=0)
    engine.run()
    check(engine.logprobs(plain), reference(tiny.model, words, NUM_TOKENS))
    check(engine.logprobs(asked[0]), answer_of(tiny, *LENGTHS[2]))
    check(engine.logprobs(asked[1]), answer_of(tiny, *LENGTHS[1], first=7))


def test_an_answer_has_the_same_bits_fresh_cached_and_in_a_batch(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory, token_budget=9)
    fresh = ask(engine, tiny, *LENGTHS[2])
    engine.run()
    cached = [ask(engine, tiny, *LENGTHS[2]) for _ in range(2)]
    engine.add(text(30, 4), [], max_tokens=9)
    engine.run()
    assert engine.engine.stats().num_cached_tokens > 0
    alone = ImageEngine(tiny.directory, token_budget=512)
    other = ask(alone, tiny, *LENGTHS[2])
    alone.run()
    answers = [*map(engine.logprobs, (fresh, *cached)), alone.logprobs(other)]
    if engine.card.numerics:  # the kernels compute this model with the same bits in every step
        assert all(answer == answers[0] for answer in answers)
    for answer in answers:
        check(answer, answer_of(tiny, *LENGTHS[2]))


def test_a_preempted_request_continues_its_answer(tiny: TinyVision) -> None:
    """There are blocks for the prompts of two requests, but not for their answers."""
    num_blocks = -(-len(prompt_with(tiny, *LENGTHS[2])[0]) // 8)
    engine = ImageEngine(tiny.directory, kv_blocks=1 + 2 * num_blocks, max_len=8 * num_blocks + 8)
    numbers = [ask(engine, tiny, *LENGTHS[2], first=3 * each, num_tokens=9) for each in range(3)]
    engine.run()
    assert engine.engine.stats().num_preemptions
    for each, number in enumerate(numbers):
        expected = answer_of(tiny, *LENGTHS[2], first=3 * each, num_tokens=9)
        check(engine.logprobs(number), expected)


def test_equal_tokens_with_other_images_share_no_answer(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory)
    for first in (0, 5):
        number = ask(engine, tiny, *LENGTHS[1], first=first)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *LENGTHS[1], first=first))


def test_a_chat_encodes_each_of_its_images_once(tiny: TinyVision) -> None:
    """Ten turns with three images recompute less than a block for each turn."""
    engine = ImageEngine(tiny.directory)
    history: list[int] = []
    images: list[Attachment] = []
    before = 0
    for turn in range(10):
        if turn in (0, 3, 6):
            image = engine.attach(tiny.tensors(turn), (len(history), tiny.num_rows))
            images.append(image)
            history += [PLACEHOLDER] * tiny.num_rows
        history += text(4, turn)
        number = engine.add(history, images, max_tokens=2)
        engine.run()
        usage = engine.outputs[number][-1].usage
        assert usage is not None
        assert usage.cached_tokens > before - 8
        before = len(history)
        history += engine.tokens(number)
    assert engine.num_encoded == engine.engine.images.num_encoded == 3


def test_the_memory_of_images_is_planned_before_the_encoder_is_loaded(tiny: TinyVision) -> None:
    config = WorkerConfig(model=str(tiny.directory), image_cache_mib=3, device="cpu")
    found = preflight([config])
    (plan,) = found.plans
    tower = ImageTower.load(tiny.directory, tiny.model.config.get_text_config().hidden_size)
    assert plan.image_bytes == tower.num_bytes + (3 << 20)
    assert " MB for images); requests of up to " in memory_line(found)
    little = preflight([config], free_bytes=plan.device_bytes - plan.kv_bytes - (1 << 20))
    assert little.is_memory
    assert "for images" in little.error
    assert "--image-cache-mib" in little.remedy


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    name = "SmolVLMForConditionalGeneration"
    return family(name, tmp_path_factory.getbasetemp() / name)


def test_the_choices_of_a_prompt_share_the_rows_of_its_image(smol: TinyVision) -> None:
    engine = ImageEngine(smol.directory)
    numbers = [ask(engine, smol, 5, 6) for _ in range(2)]
    engine.run()
    for number in numbers:
        check(engine.logprobs(number), answer_of(smol, 5, 6))
    assert engine.num_encoded == 1


def test_drafts_do_not_change_an_answer_about_an_image(smol: TinyVision) -> None:
    """Few tokens are allowed, so that drafts are often right."""
    few = {"logit_bias": dict.fromkeys((3, 4), 50.0), "max_tokens": 40, "logprobs": 0}
    prompt, runs = prompt_with(smol, 5, 6)
    answers = []
    for options in ({}, {"speculation": "ngram", "ngram_min": 1}):
        engine = ImageEngine(smol.directory, engine=options)
        number = engine.add(prompt, attach(engine, smol, runs, [0]), **few)
        engine.run()
        answers.append(engine.logprobs(number))
    check(answers[1], answers[0])
    assert len({token for token, _ in answers[0]}) == 2
    usage = engine.outputs[number][-1].usage
    assert usage is not None
    assert 0 < usage.accepted_tokens < usage.draft_tokens


def test_an_image_that_does_not_fit_the_encoder_ends_its_request(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory)
    (first, count) = prompt_with(tiny, 5, 6)[1][0]
    image = engine.attach(tiny.tensors(0), (first, count - 1))
    with pytest.raises(ValueError, match=f"has {count} tokens; expected {count - 1}"):
        engine.tower.encode(image.digest, tiny.tensors(0), count - 1)
    with pytest.raises(ValueError, match="not those of its digest"):
        engine.tower.encode(image.digest, tiny.tensors(1), count)
    tensors = tiny.tensors(0)[1:]
    with pytest.raises(ValueError, match="do not fit the encoder"):
        engine.tower.encode(attachment_digest(tensors), tensors, count)
