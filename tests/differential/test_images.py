"""Answers about images are those of transformers, however the engine schedules them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import Attachment, attachment_digest
from tests.support.image_engine import ImageEngine, reference
from tests.support.vision_models import (
    ARCHITECTURES,
    LENGTHS,
    NUM_TOKENS,
    PLACEHOLDER,
    WHOLE_RUNS,
    TinyVision,
    answer_of,
    ask,
    attach,
    check,
    family,
    prompt_with,
    text,
)
from tests.support.wrapper_models import random_wrapper, write_wrapper
from tools.commands.models import memory_line
from worker.device import device
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.startup.assembly import assemble
from worker.startup.preflight import preflight
from worker.vision.encoder_files import DirectoryEncoder
from worker.vision.tower import ImageTower

ALIKE = [
    "Glm4vMoeForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
]
"""Those made of the parts of others, for which one test is enough."""


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


@pytest.fixture(params=[name for name in ARCHITECTURES if name not in ALIKE], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return family(request.param, tmp_path_factory.getbasetemp() / request.param)


def lengths_of(tiny: TinyVision) -> list[tuple[int, ...]]:
    if not tiny.types:
        return LENGTHS
    return [*LENGTHS[:3], (5, 1, 1, 3), (4, 0)]


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 512])
def test_an_answer_is_that_of_transformers_wherever_chunks_end(
    tiny: TinyVision, budget: int
) -> None:
    """With these budgets, a chunk ends at each position of an image if it may."""
    engine = ImageEngine(tiny.directory, token_budget=tiny.budget(budget))
    for lengths in lengths_of(tiny) if budget == 512 else LENGTHS[2:3]:
        number = ask(engine, tiny, *lengths)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *lengths))


@pytest.mark.parametrize("architecture", ALIKE)
def test_a_family_of_known_parts_gives_the_answers_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    alike = family(architecture, tmp_path)
    engine = ImageEngine(alike.directory, token_budget=7)
    numbers = [ask(engine, alike, *LENGTHS[2], first=first) for first in (0, 2)]
    engine.run()
    for number, first in zip(numbers, (0, 2), strict=True):
        check(engine.logprobs(number), answer_of(alike, *LENGTHS[2], first=first))


def test_torch_gives_the_answers_of_the_compiled_kernels(tmp_path: Path) -> None:
    """This family adds to the hidden states after its first layers, too."""
    qwen = family("Qwen3VLForConditionalGeneration", tmp_path)
    engine = ImageEngine(qwen.directory, token_budget=7, kernels="torch")
    number = ask(engine, qwen, *LENGTHS[2])
    engine.run()
    check(engine.logprobs(number), answer_of(qwen, *LENGTHS[2]))


def test_texts_and_images_are_computed_in_one_batch(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory, token_budget=tiny.budget(11))
    words = text(20, 9)
    asked = [ask(engine, tiny, *LENGTHS[2]), ask(engine, tiny, *LENGTHS[1], first=7)]
    plain = engine.add(words, [], max_tokens=NUM_TOKENS, logprobs=0)
    engine.run()
    check(engine.logprobs(plain), reference(tiny.model, words, NUM_TOKENS))
    check(engine.logprobs(asked[0]), answer_of(tiny, *LENGTHS[2]))
    check(engine.logprobs(asked[1]), answer_of(tiny, *LENGTHS[1], first=7))


def test_an_answer_has_the_same_bits_fresh_cached_and_in_a_batch(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory, token_budget=tiny.budget(9))
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
    prompts = [prompt_with(tiny, *LENGTHS[2], first=5 * each)[0] for each in range(3)]
    num_blocks = -(-max(map(len, prompts)) // 8)
    has_groups = tiny.architecture.startswith("Gemma3")  # two blocks in a column, one of a window
    room = 20 if has_groups else 2 * num_blocks
    engine = ImageEngine(tiny.directory, kv_blocks=1 + room, max_len=8 * num_blocks + 8)
    numbers = [ask(engine, tiny, *LENGTHS[2], first=5 * each, num_tokens=9) for each in range(3)]
    engine.run()
    assert engine.engine.stats().num_preemptions
    for each, number in enumerate(numbers):
        expected = answer_of(tiny, *LENGTHS[2], first=5 * each, num_tokens=9)
        check(engine.logprobs(number), expected)


def test_drafts_change_no_answer(tiny: TinyVision) -> None:
    """The prompt contains every token, so each token of the answer is followed by drafts."""
    engine = ImageEngine(
        tiny.directory, engine={"speculation": "ngram", "ngram_min": 1}, max_len=512
    )
    prompt, runs = prompt_with(tiny, 5, 4, 0)
    prompt += range(PLACEHOLDER)
    images = attach(engine, tiny, runs, range(2))
    number = engine.add(prompt, images, max_tokens=NUM_TOKENS, logprobs=0)
    engine.run()
    assert engine.engine.stats().num_draft_tokens
    expected = reference(tiny.model, prompt, NUM_TOKENS, tiny.types, **tiny.inputs(0, 1))
    check(engine.logprobs(number), expected)


@pytest.mark.parametrize("architecture", sorted(WHOLE_RUNS))
def test_torch_computes_images_as_a_whole(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny = family(architecture, tmp_path_factory.getbasetemp() / architecture)
    engine = ImageEngine(tiny.directory, token_budget=tiny.budget(6), kernels="torch")
    asked = [ask(engine, tiny, *LENGTHS[2]), ask(engine, tiny, *LENGTHS[1], first=7)]
    engine.run()
    check(engine.logprobs(asked[0]), answer_of(tiny, *LENGTHS[2]))
    check(engine.logprobs(asked[1]), answer_of(tiny, *LENGTHS[1], first=7))


@pytest.mark.parametrize(
    ("token_budget", "max_slots", "expected", "reason"),
    [
        (0, 4, 256, ""),
        (0, 250, 265, ""),
        (19, 4, 19, ""),
        (18, 4, 18, "one step of 16 tokens: serve with --token-budget 19, or more"),
    ],
)
def test_a_step_has_room_for_an_image_or_images_are_refused(
    token_budget: int,
    max_slots: int,
    expected: int,
    reason: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    name = "Gemma3ForConditionalGeneration"
    tiny = family(name, tmp_path_factory.getbasetemp() / name)
    config = WorkerConfig(
        model=str(tiny.directory),
        max_slots=max_slots,
        token_budget=token_budget,
        kv_blocks=129,
        max_len=256,
    )
    ready = assemble(config, StartupTiming()).ready
    assert ready.token_budget == expected
    assert ready.model.images is not None
    assert ready.model.images.sees_whole_runs == (not reason)
    assert reason in ready.model.images.reason
    assert bool(ready.image_rows) == (not reason)


def test_equal_tokens_with_other_images_share_no_answer(tiny: TinyVision) -> None:
    engine = ImageEngine(tiny.directory)
    for first in (0, 5):
        number = ask(engine, tiny, *LENGTHS[1], first=first)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *LENGTHS[1], first=first))


def test_a_chat_encodes_each_of_its_images_once(tiny: TinyVision) -> None:
    """Ten turns with three images recompute less than a block for each turn, and an image that
    ends in it if that is computed as a whole."""
    engine = ImageEngine(tiny.directory)
    history: list[int] = []
    images: list[Attachment] = []
    before = 0
    for turn in range(10):
        if turn in (0, 3, 6):
            images += attach(engine, tiny, [(len(history), tiny.num_rows(turn))], [turn])
            history += [PLACEHOLDER] * tiny.num_rows(turn)
        history += text(4, turn)
        number = engine.add(history, images, max_tokens=2)
        engine.run()
        usage = engine.outputs[number][-1].usage
        assert usage is not None
        assert usage.cached_tokens > before - 8 - tiny.is_whole * (tiny.num_rows(0) + 8)
        before = len(history)
        history += engine.tokens(number)
    assert engine.num_encoded == engine.engine.images.num_encoded == 3


def test_rows_are_kept_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    qwen = family("Qwen3VLForConditionalGeneration", tmp_path)
    num_rows, tensors = [], qwen.tensors(0)
    for dtype in ("float32", "bfloat16"):
        config = WorkerConfig(model=str(qwen.directory), dtype=dtype, kv_blocks=9)
        assembled = assemble(config, StartupTiming())
        assert assembled.tower is not None
        num_rows.append(assembled.ready.image_rows)
        rows = assembled.tower.encode(attachment_digest(tensors), tensors, qwen.num_rows(0))
        assert rows.dtype is getattr(torch, dtype)
    assert num_rows[1] == 2 * num_rows[0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("left out", "is missing"),
        ("quantised", "is quantised"),
        ("shortened", "has the shape (47,); expected (48,)"),
    ],
)
def test_a_text_is_served_without_the_weights_of_the_encoder(
    fault: str, why: str, tmp_path: Path
) -> None:
    """Those who fine-tune the text part publish such checkpoints."""
    qwen = family("Qwen3_5ForConditionalGeneration", tmp_path)
    file = qwen.directory / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("visual.merger.norm.weight"))
    if fault == "quantised":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif fault == "shortened":
        tensors[name] = tensors[name][1:].clone()
    else:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    assembled = assemble(WorkerConfig(model=str(qwen.directory), kv_blocks=9), StartupTiming())
    assert assembled.runner is not None
    assert assembled.tower is None
    assert assembled.ready.model.images is not None
    reason = assembled.ready.model.images.reason
    assert f"visual.merger.norm.weight {why}" in reason
    assert str(tmp_path) not in reason


def test_no_memory_is_allocated_for_an_encoder_that_is_larger_than_its_files(
    tmp_path: Path,
) -> None:
    """The machine has less memory than such an encoder needs."""
    qwen = family("Qwen3_5ForConditionalGeneration", tmp_path)
    files = DirectoryEncoder(qwen.directory)
    files.config = json.loads(files.texts["config.json"])
    files.config["vision_config"]["intermediate_size"] = 1 << 40
    with pytest.raises(UnusableModel, match=r"mlp\.linear_fc1\.weight has the shape"):
        ImageTower.load(files, 96, torch.float32)


def test_images_are_refused_without_the_sections_of_their_axes(tmp_path: Path) -> None:
    model = random_wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text")
    assert "mrope_section" not in model.config.text_config.rope_parameters
    config = WorkerConfig(model=str(write_wrapper(tmp_path, model)), kv_blocks=9)
    assembled = assemble(config, StartupTiming())
    assert assembled.tower is None
    assert assembled.ready.model.images is not None
    assert "no mrope_section" in assembled.ready.model.images.reason


def test_the_memory_of_images_is_planned_before_the_encoder_is_loaded(tiny: TinyVision) -> None:
    config = WorkerConfig(model=str(tiny.directory), image_cache_mib=3, device="cpu")
    found = preflight([config])
    (plan,) = found.plans
    hidden = tiny.model.config.get_text_config().hidden_size
    tower = ImageTower.load(DirectoryEncoder(tiny.directory), hidden, torch.float32)
    assert plan.image_bytes == tower.num_bytes + (3 << 20)
    assert " MB for images); requests of up to " in memory_line(found)
    little = preflight([config], free_bytes=plan.image_bytes + (1 << 20))
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
