"""A GGUF file with an mmproj file gives the answers of the model's safetensors about images."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Container, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from gateway.images.families import FAMILIES as PROMPTERS
from gateway.images.families import ImageFacts
from gateway.images.model_images import ModelImages
from gateway.images.processor import preprocessed
from gateway.images.settings import CheckpointFiles
from gateway.images.source import ImageSource
from gateway.text.tokenizer import Tokenizer
from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import attachment_digest
from protocol.shared.mmproj import ENCODED_ARCHITECTURES, ENCODED_KINDS
from protocol.wire.errors import InvalidImage
from tests.support.image_engine import ImageEngine
from tests.support.image_models import picture
from tests.support.mmproj_files import write_mmproj, write_text
from tests.support.vision_models import (
    CHANGES,
    LENGTHS,
    PLACEHOLDER,
    TinyVision,
    answer_of,
    ask,
    check,
    written,
)
from tests.support.wrapper_models import random_wrapper
from tools import doctor_findings as findings
from worker.checkpoint.gguf_tokens import CONTROL, NORMAL, USER_DEFINED
from worker.device import device
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.startup.assembly import assemble
from worker.startup.preflight import preflight
from worker.vision.encoder_files import DirectoryEncoder, EncoderFiles
from worker.vision.mmproj_header import OTHER_FILE
from worker.vision.projectors import PROJECTORS
from worker.vision.support import NO_ENCODER, FoundImages, find_images
from worker.vision.tensor_names import is_of_images
from worker.vision.tower import ImageTower

IDEFICS, GEMMA, MISTRAL, QWEN2, WINDOWED, QWEN, HYBRID = (
    "Idefics3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
PARTS: dict[str, dict[str, Any]] = {
    IDEFICS: {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    GEMMA: {"image_size": 56, "num_hidden_layers": 2},
    MISTRAL: {"image_size": 112, "num_hidden_layers": 3, "hidden_act": "silu"},
    QWEN2: {"depth": 3},
    WINDOWED: {"depth": 4, "fullatt_block_indexes": [1, 3]},
    QWEN: {"depth": 4, "deepstack_visual_indexes": [0, 2]},
    HYBRID: {"depth": 2},
}
"""Architecture -> keys of the config of its encoder."""
STORED: dict[str, dict[str, Any]] = {
    GEMMA: {"query_pre_attn_scalar": 32},
    MISTRAL: {"rms_norm_eps": 1e-5},
}
"""Architecture -> options that GGUF files do not store, with the only value that is computed."""


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


def made(architecture: str, directory: Path) -> TinyVision:
    """Return a model. Its directory has the safetensors, the GGUF file and the mmproj file."""
    changes = CHANGES.get(architecture, {})
    whole = {**changes.get("whole", {}), "vision_config": PARTS[architecture]}
    own = {**changes, **STORED.get(architecture, {}), "whole": whole}
    tiny = written(architecture, directory, **own)
    write_text(gguf_of(tiny), tiny.model)
    write_mmproj(mmproj_of(tiny), tiny.model)
    return tiny


Made = Callable[[str], TinyVision]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that makes the model of an architecture, once."""
    return cache(lambda architecture: made(architecture, tmp_path_factory.mktemp(architecture)))


@pytest.fixture(scope="module", params=PARTS)
def tiny(request: pytest.FixtureRequest, model_of: Made) -> TinyVision:
    return model_of(request.param)


@pytest.fixture(scope="module")
def idefics(model_of: Made) -> TinyVision:
    return model_of(IDEFICS)


def gguf_of(tiny: TinyVision) -> Path:
    return tiny.directory / "text.gguf"


def mmproj_of(tiny: TinyVision) -> Path:
    return tiny.directory / "mmproj-text.gguf"


def found(model: Path, mmproj: Path | str = "") -> EncoderFiles:
    files = find_images(WorkerConfig(model=str(model), mmproj=str(mmproj))).files
    assert files is not None
    return files


class Everything(Container[str]):
    def __contains__(self, item: object) -> bool:
        return True


def weights(model: Path, mmproj: Path | str = "") -> Mapping[str, torch.Tensor]:
    return found(model, mmproj).read(Everything())


def test_an_answer_about_images_is_that_of_transformers(tiny: TinyVision) -> None:
    engine = ImageEngine(gguf_of(tiny), token_budget=tiny.budget(7), mmproj=str(mmproj_of(tiny)))
    for lengths in LENGTHS[:3]:
        number = ask(engine, tiny, *lengths)
        engine.run()
        check(engine.logprobs(number), answer_of(tiny, *lengths))


def test_the_weights_are_those_of_the_safetensors(tiny: TinyVision) -> None:
    ours, theirs = weights(gguf_of(tiny)), DirectoryEncoder(tiny.directory).read(Everything())
    of_images = {name for name in theirs if is_of_images(name) and ".head." not in name}
    assert ours.keys() == of_images
    for name, each in ours.items():
        # One is added to a norm in the file and subtracted again.
        assert torch.allclose(each, theirs[name], atol=1e-7), name


def test_the_images_of_a_gateway_fit_the_encoder(tiny: TinyVision) -> None:
    """The settings of the image processor are those of the mmproj file."""
    files = found(gguf_of(tiny))
    texts = CheckpointFiles.from_card(files.texts)
    prompter = PROMPTERS[files.config["model_type"]](texts, {}, "\0")  # type: ignore[operator]
    hidden = tiny.model.config.get_text_config().hidden_size
    tower = ImageTower.load(files, hidden, torch.float32)
    for size in ((40, 40), (130, 50)):
        image = preprocessed(picture(*size), prompter.settings(has_company=False))
        facts = ImageFacts(image.numbers, image.shapes)
        count = prompter.text(facts, has_company=False).text.count("\0")
        rows = tower.encode(attachment_digest(image.tensors), image.tensors, count)
        assert rows.isfinite().all()


COLOURS = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.5, 0.25]}
ANY_SIZE = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    IDEFICS: (
        {
            "size": {"longest_edge": 4 * 28},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
        {"image_seq_len": 1},
    ),
    GEMMA: ({"size": {"height": 56, "width": 56}}, {"image_seq_length": 16}),
    MISTRAL: (
        {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    QWEN2: (ANY_SIZE | {"size": {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}}, {}),
    WINDOWED: (ANY_SIZE | {"size": {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}}, {}),
    QWEN: (ANY_SIZE | {"size": {"shortest_edge": 64 * 784, "longest_edge": 16384 * 784}}, {}),
    HYBRID: (ANY_SIZE | {"size": {"shortest_edge": 64 * 784, "longest_edge": 16384 * 784}}, {}),
}
"""Architecture -> the settings of the image processor besides the colours, and of the processor."""


def test_images_are_preprocessed_as_in_the_published_models(tiny: TinyVision) -> None:
    files = CheckpointFiles.from_card(found(gguf_of(tiny)).texts)
    image, joint = PROCESSORS[tiny.architecture]
    assert files.image == image | COLOURS
    assert files.joint == joint


@pytest.mark.parametrize("least", [784, None])
def test_the_numbers_of_pixels_in_a_file_bound_its_images(
    model_of: Made, tmp_path: Path, least: int | None
) -> None:
    qwen = model_of(QWEN)
    changes = {"clip.vision.image_min_pixels": least, "clip.vision.image_max_pixels": 7840}
    file = write_mmproj(tmp_path / "bounded.gguf", qwen.model, changes=changes)
    files = CheckpointFiles.from_card(found(gguf_of(qwen), file).texts)
    assert files.image["size"] == {"shortest_edge": least or 7840, "longest_edge": 7840}


def test_the_memory_plan_counts_an_mmproj_file_beside_the_model(tiny: TinyVision) -> None:
    config = WorkerConfig(model=str(gguf_of(tiny)), image_cache_mib=3, device="cpu")
    (plan,) = preflight([config]).plans
    hidden = tiny.model.config.get_text_config().hidden_size
    tower = ImageTower.load(found(gguf_of(tiny)), hidden, torch.float32)
    assert plan.image_bytes == tower.num_bytes + (3 << 20)
    little = preflight([config], free_bytes=plan.image_bytes + (1 << 20))
    assert "serve text only (--mmproj none)" in little.remedy
    (text,) = preflight([WorkerConfig(model=str(gguf_of(tiny)), mmproj="none")]).plans
    assert not text.image_bytes


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_weights_of_other_types_are_dequantised(
    idefics: TinyVision, tmp_path: Path, kind: str
) -> None:
    def kinds(name: str) -> GGMLQuantizationType:
        is_whole = name.endswith((".ffn_up.weight", ".ffn_down.weight", "mm.model.fc.weight"))
        return GGMLQuantizationType[kind] if is_whole else GGMLQuantizationType.F32

    file = write_mmproj(tmp_path / "other.gguf", idefics.model, kinds)
    rounded = weights(gguf_of(idefics), file)
    exact = weights(gguf_of(idefics))
    changed = [name for name, each in rounded.items() if not torch.equal(each, exact[name])]
    assert len(changed) == 5
    for name in changed:
        own = GGMLQuantizationType[kind]
        stored = quants.quantize(exact[name].numpy(), own)
        assert torch.equal(rounded[name], torch.from_numpy(quants.dequantize(stored, own)))


def test_matrices_whose_names_older_converters_swap_are_found(
    idefics: TinyVision, tmp_path: Path
) -> None:
    file = write_mmproj(tmp_path / "older.gguf", idefics.model, swaps=True)
    older, newer = (weights(gguf_of(idefics), each) for each in (file, ""))
    assert all(torch.equal(older[name], each) for name, each in newer.items())


def test_the_digest_of_a_model_covers_its_encoder(idefics: TinyVision, tmp_path: Path) -> None:
    other = write_mmproj(tmp_path / "other.gguf", idefics.model, GGMLQuantizationType.F16)
    cards = [
        assemble(
            WorkerConfig(model=str(gguf_of(idefics)), mmproj=mmproj, kv_blocks=9), StartupTiming()
        ).ready.model
        for mmproj in ("", str(mmproj_of(idefics)), str(other), "none")
    ]
    assert cards[0].digest == cards[1].digest
    assert len({card.digest for card in cards}) == 3
    assert [card.images is not None for card in cards] == [True, True, True, False]


def test_a_download_brings_the_encoders_that_can_be_used() -> None:
    served = (each.architectures for each in PROJECTORS.values())
    assert frozenset().union(*served) == ENCODED_ARCHITECTURES
    assert PROJECTORS.keys() == ENCODED_KINDS


HEADS, MERGE, SCALE, MIN_PIXELS, MAX_PIXELS = (
    f"clip.vision.{name}"
    for name in (
        "attention.head_count",
        "spatial_merge_size",
        "projector.scale_factor",
        "image_min_pixels",
        "image_max_pixels",
    )
)
CHANGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind": (
        IDEFICS,
        {"clip.projector_type": "kimivl"},
        "kind 'kimivl', which is not supported",
    ),
    "no kind": (IDEFICS, {"clip.projector_type": None}, "kind '', which is not supported"),
    "another GGUF file": (IDEFICS, {"general.architecture": "llama"}, "not an mmproj file"),
    "of another family": (IDEFICS, {"clip.projector_type": "gemma3"}, "architecture gemma3, and"),
    "no heads": (IDEFICS, {HEADS: 0}, "head_count is 0; it must be from 1"),
    "odd heads": (IDEFICS, {HEADS: 7}, "7 heads do not divide a width of 64"),
    "odd halves of heads": (MISTRAL, {HEADS: 16}, "has 48 rows for 16 heads"),
    "heads missing": (IDEFICS, {HEADS: None}, "head_count"),
    "a wrong size": (IDEFICS, {"clip.vision.image_size": 56}, "it has 4 positions, but"),
    "a huge size": (IDEFICS, {"clip.vision.image_size": 1 << 30}, "it must be from 1 to 16,384"),
    "a wrong scale": (
        IDEFICS,
        {SCALE: 3},
        "scale_factor is 3, but 'mm.model.fc.weight' reads 256 numbers; patches have 64",
    ),
    "a huge scale": (GEMMA, {SCALE: 5}, "5 patches in a row do not fit into 4"),
    "a wrong merge": (MISTRAL, {MERGE: 1}, "merge_size is 1, but 'mm.patch_merger.weight' reads"),
    "no merge": (MISTRAL, {MERGE: None}, "Pixtral without merging of patches is not supported"),
    "a huge merge": (
        QWEN,
        {MERGE: 4096},
        "merge_size is 4096, but 'mm.0.weight' reads 192 numbers; patches have 48",
    ),
    "huge images": (QWEN, {MAX_PIXELS: 1 << 31}, "it must be from 1 to 1,073,741,824"),
    "no images": (QWEN, {MIN_PIXELS: 9, MAX_PIXELS: 8}, "is 9, but images have at most 8"),
    "a short mean": (
        IDEFICS,
        {"clip.vision.image_mean": [0.5, 0.5]},
        "image_mean must have three numbers",
    ),
    "no deviation": (IDEFICS, {"clip.vision.image_std": [0.5, 0.5, 0.0]}, "image_std[2]"),
}
"""Architecture, other metadata of its mmproj file, and a part of the reason for the refusal."""


OF_ANOTHER_MODEL = {"another GGUF file", "of another family"}
"""Those in place of which the file of the model can be given."""


@pytest.mark.parametrize("change", CHANGED)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    model_of: Made, tmp_path: Path, change: str
) -> None:
    architecture, changes, reason = CHANGED[change]
    tiny = model_of(architecture)
    file = write_mmproj(tmp_path / "mmproj.gguf", tiny.model, changes=changes)
    refused = preflight([WorkerConfig(model=str(gguf_of(tiny)), mmproj=str(file))])
    assert refused.error.startswith("--mmproj: ")
    assert str(file) in refused.error
    assert reason in refused.error
    assert "none" in refused.remedy
    assert (refused.remedy == OTHER_FILE) == (change in OF_ANOTHER_MODEL)


def test_other_files_and_models_are_refused_at_the_start(
    idefics: TinyVision, tmp_path: Path
) -> None:
    text, mmproj = gguf_of(idefics), mmproj_of(idefics)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(mmproj.read_bytes()[:-100])
    page = tmp_path / "page.gguf"
    page.write_text("<html>")
    left_out = write_mmproj(tmp_path / "a.gguf", idefics.model, skips="v.blk.1.ffn_up.bias")
    for model, file, reason in (
        (idefics.directory, mmproj, "is for GGUF files"),
        (text, damaged, "it is truncated"),
        (text, page, "is not a GGUF file"),
        (text, tmp_path / "missing.gguf", "No such file"),
        (text, left_out, "it has no tensor 'v.blk.1.ffn_up.bias'"),
        (text, text, "not an mmproj file"),
    ):
        with pytest.raises(UnusableModel, match=reason) as refused:
            find_images(WorkerConfig(model=str(model), mmproj=str(file)))
        assert "--mmproj" in refused.value.message
        assert refused.value.remedy


@pytest.mark.parametrize(
    ("text", "encoder", "numbers"),
    [
        (HYBRID, QWEN, "for 2 layers of its model (DeepStack), and this model reads them in 0"),
        (QWEN, HYBRID, "for 0 layers of its model (DeepStack), and this model reads them in 2"),
    ],
)
def test_an_encoder_of_the_same_width_for_other_layers_is_refused(
    model_of: Made, text: str, encoder: str, numbers: str
) -> None:
    model, file = gguf_of(model_of(text)), mmproj_of(model_of(encoder))
    with pytest.raises(UnusableModel, match=re.escape(numbers)) as refused:
        find_images(WorkerConfig(model=str(model), mmproj=str(file)))
    assert refused.value.remedy == OTHER_FILE


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ("v.deepstack.2.fc1.weight", "it has no tensor 'v.deepstack.2.fc1.weight'"),
        ("v.deepstack.2.norm.weight", "it makes rows for 1 layers of its model"),
    ],
)
def test_an_encoder_without_tensors_of_deepstack_is_refused(
    model_of: Made, tmp_path: Path, left_out: str, reason: str
) -> None:
    qwen = model_of(QWEN)
    file = write_mmproj(tmp_path / "mmproj.gguf", qwen.model, skips=left_out)
    with pytest.raises(UnusableModel, match=reason):
        found(gguf_of(qwen), file)


def test_a_directory_is_served_as_text_only_if_the_option_says_so(idefics: TinyVision) -> None:
    assert find_images(WorkerConfig(model=str(idefics.directory))).files is not None
    assert find_images(WorkerConfig(model=str(idefics.directory), mmproj="none")).files is None


def test_an_encoder_in_place_of_the_model_is_refused_with_the_option(idefics: TinyVision) -> None:
    refused = preflight([WorkerConfig(model=str(mmproj_of(idefics)))])
    assert "an image encoder (mmproj), not a model" in refused.error
    assert "with --mmproj" in refused.remedy


def test_the_encoder_of_a_wider_model_is_refused(idefics: TinyVision, tmp_path: Path) -> None:
    wide = random_wrapper(IDEFICS, "llama", hidden_size=192)
    file = write_mmproj(tmp_path / "mmproj.gguf", wide)
    reason = f"{file}: its rows have a width of 192, and the model's 96"
    with pytest.raises(UnusableModel, match=reason):
        find_images(WorkerConfig(model=str(gguf_of(idefics)), mmproj=str(file)))


def test_a_model_without_a_placeholder_reads_no_images(idefics: TinyVision, tmp_path: Path) -> None:
    model = write_text(tmp_path / "text.gguf", idefics.model, placeholder="<other>")
    with pytest.raises(UnusableModel, match="has no token '<image>' to stand for images"):
        find_images(WorkerConfig(model=str(model), mmproj=str(mmproj_of(idefics))))


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_an_unused_token_stands_for_images_if_the_vocabulary_is_that_of_the_text(
    model_of: Made, tmp_path: Path, kind: int
) -> None:
    gemma = model_of(GEMMA)
    model = write_text(tmp_path / "text.gguf", gemma.model, "<unused0>", kind)
    assert found(model, mmproj_of(gemma)).config["image_token_index"] == PLACEHOLDER


def test_an_ordinary_token_never_stands_for_images(model_of: Made, tmp_path: Path) -> None:
    gemma = model_of(GEMMA)
    model = write_text(tmp_path / "text.gguf", gemma.model, "<unused0>", NORMAL)
    with pytest.raises(UnusableModel, match="has no token '<image_soft_token>'"):
        found(model, mmproj_of(gemma))


def test_only_a_fitting_file_beside_the_model_is_used(idefics: TinyVision, tmp_path: Path) -> None:
    model = Path(shutil.copy(gguf_of(idefics), tmp_path))
    config = WorkerConfig(model=str(model))
    assert find_images(config) == FoundImages(None)
    first = write_mmproj(tmp_path / "mmproj-F16.gguf", idefics.model)
    assert find_images(config).files is not None
    shutil.copy(first, tmp_path / "mmproj-F32.gguf")
    best = find_images(config).files
    assert best is not None
    assert best.paths == [first]
    shutil.copy(first, tmp_path / "model-MMPROJ-F32.gguf")
    several = find_images(config)
    assert several.files is None
    assert several.reason == NO_ENCODER
    assert "differ in more than the number type: mmproj-F16.gguf, " in several.cause
    for name in ("mmproj-F16.gguf", "mmproj-F32.gguf"):
        (tmp_path / name).unlink()
    other = {"clip.projector_type": "gemma3"}
    write_mmproj(tmp_path / "model-MMPROJ-F32.gguf", idefics.model, changes=other)
    unused = find_images(config)
    assert unused.files is None
    assert unused.reason == NO_ENCODER
    assert "model-MMPROJ-F32.gguf is of a model of the architecture gemma3" in unused.cause
    (line,) = (each for each in findings.model(preflight([config])) if each.subject == "images")
    assert unused.cause in line.fact
    assert "--mmproj" in line.remedy


def test_images_of_a_model_without_its_encoder_are_refused_with_the_remedy(
    model_of: Made, tmp_path: Path
) -> None:
    model = str(shutil.copy(gguf_of(model_of(QWEN)), tmp_path))
    card = assemble(WorkerConfig(model=model, kv_blocks=9), StartupTiming()).ready.model
    images = ModelImages(card, Tokenizer(card), None)
    with pytest.raises(InvalidImage, match=r"no image encoder .* give the file with --mmproj"):
        images.check([ImageSource(param="messages[0].content[0]", url="data:,")])
