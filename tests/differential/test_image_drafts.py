"""Drafts of a model, and of a checkpoint's own head, for answers about images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.draft_heads import check_proposals, write_with_head
from tests.support.image_engine import ImageEngine
from tests.support.vision_models import (
    ARCHITECTURES,
    CHANGES,
    LENGTHS,
    PLACEHOLDER,
    TinyVision,
    answer_of,
    ask,
    check,
)
from tests.support.wrapper_models import random_wrapper, write_wrapper
from worker.device import device

NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


def without_sight(architecture: str, directory: Path) -> TinyVision:
    """Return a model for which an image is as many placeholders, at the positions of an image: the
    rows of images and the embedding of the placeholder are zero."""
    model = random_wrapper(architecture, ARCHITECTURES[architecture], **CHANGES[architecture])
    merger = model.model.visual.merger
    last = [each for each in merger.modules() if isinstance(each, torch.nn.Linear)][-1]
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.zero_()
        model.get_input_embeddings().weight[PLACEHOLDER].zero_()
    return TinyVision(architecture, model, write_wrapper(directory, model))


def drafted(tiny: TinyVision, draft: Path, **options: Any) -> ImageEngine:
    """Return an engine that has answered requests with drafts of the model `draft`."""
    engine = ImageEngine(
        tiny.directory,
        engine={"speculation": "model"},
        draft_model=str(draft),
        max_drafts=4,
        token_budget=9,
        **options,
    )
    for lengths in LENGTHS[1:3]:
        number = ask(engine, tiny, *lengths, num_tokens=NUM_TOKENS)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *lengths, num_tokens=NUM_TOKENS))
    assert engine.engine.stats().num_draft_tokens
    return engine


@pytest.mark.parametrize("architecture", ["Glm4v", "Qwen2_5_VL"])
def test_a_draft_model_has_the_positions_of_the_model(architecture: str, tmp_path: Path) -> None:
    """It sees placeholders in place of images. Here the model does so, too, and the draft model has
    its weights, so each draft is right if the positions are."""
    tiny = without_sight(f"{architecture}ForConditionalGeneration", tmp_path)
    stats = drafted(tiny, tmp_path).engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_draft_model_without_axes_has_the_positions_of_a_text(tmp_path: Path) -> None:
    """The compiled kernels compute its drafts as torch does, which needs the axis of each pair."""
    tiny = without_sight("Qwen2_5_VLForConditionalGeneration", tmp_path / "model")
    draft = write_wrapper(tmp_path / "draft", tiny.model)
    config = json.loads((draft / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["mrope_section"]
    (draft / "config.json").write_text(json.dumps(config))
    found = []
    for kernels in ("auto", "torch"):
        stats = drafted(tiny, draft, kernels=kernels).engine.stats()
        found.append((stats.num_draft_tokens, stats.num_accepted_tokens))
    assert found[0] == found[1]
    assert found[0][1] < found[0][0]


@pytest.mark.parametrize("architecture", ["Glm4vMoe", "Qwen3_5"])
def test_a_head_has_the_positions_of_the_model(architecture: str, tmp_path: Path) -> None:
    """Each of its proposals is that of the reference for the whole text, with the positions of
    transformers. The head reads the embeddings of placeholders, not the rows of images."""
    name = f"{architecture}ForConditionalGeneration"
    reference = write_with_head(tmp_path, ARCHITECTURES[name], wrapper=name, **CHANGES[name])
    tiny = TinyVision(name, reference.theirs, tmp_path)
    reference.images = tiny.inputs(0, 1)
    engine = ImageEngine(
        tmp_path,
        engine={"speculation": "mtp"},
        draft_head=True,
        max_drafts=4,
        token_budget=9,
    )
    number = ask(engine, tiny, *LENGTHS[2], num_tokens=NUM_TOKENS)
    count = 0
    while engine.step():
        plan, result = engine.steps[-1]
        if result.proposed is not None:
            slots = engine.runner.components.slots
            count += check_proposals(reference, slots, plan, result)
    assert count > 4
    check(engine.logprobs(number), answer_of(tiny, *LENGTHS[2], num_tokens=NUM_TOKENS))
