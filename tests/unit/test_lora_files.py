"""Adapters that are damaged, do not fit the model, or need what is not supported, are refused by
name, and no path leads out of the directory of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from tests.support.adapters import peft_model, read, write_adapter
from tests.support.checkpoints import random_llama, write_directory
from tests.support.eager import load
from worker.loading.decoder import LoadedModel
from worker.lora.adapter import DOWN, PREFIX, UP, WEIGHTS, find_adapter
from worker.lora.config import CONFIG, parse_config
from worker.lora.errors import MissingAdapter, UnusableAdapter
from worker.lora.targets import adapter_bytes, find_targets

Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_directory(tmp_path_factory.mktemp("model"), model))


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", peft_model(model))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the adapter, whose names lack Q; None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def refusal(folder: Path, loaded: LoadedModel, **options: Any) -> str:
    with pytest.raises(UnusableAdapter) as caught:
        read(folder, loaded, **options)
    return caught.value.message


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "peft_type": {"peft_type": "IA3"},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "target_parameters": {"target_parameters": ["experts.down"]},
    "a_future_option": {"a_future_option": {"depth": 2}},
    "'r'": {"r": "8"},
    "r must be": {"r": 0},
    "lora_alpha": {"lora_alpha": None},
    "rank_pattern": {"rank_pattern": {"q_(proj|other)+": 4}},
    "rank_pattern: 'q_proj'": {"rank_pattern": {"q_proj": True}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": "much"}},
}


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_an_unsupported_or_wrong_key_of_the_config_is_named(folder, loaded, named):
    change_config(folder, **UNSUPPORTED[named])
    assert named in refusal(folder, loaded)


def test_unset_options_of_other_releases_of_peft_are_ignored(folder, loaded):
    change_config(folder, a_future_option=None, another=False, lists=[])
    assert read(folder, loaded).rank == 4


def test_a_pattern_matches_a_whole_name_or_the_end_of_one():
    config = parse_config(
        {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 4, "mlp.up_proj": 16},
            "alpha_pattern": {r"layers\.2\.self_attn\.q_proj$": 6},
        }
    )
    layers = [f"model.layers.{n}" for n in range(3)]
    assert [config.rank_of(f"{each}.self_attn.q_proj") for each in layers] == [2, 2, 2]
    assert [config.rank_of(f"{each}.mlp.up_proj") for each in layers] == [16, 4, 16]
    assert config.rank_of("model.layers.0.self_attn.not_q_proj") == 8
    assert [config.scale_of(f"{each}.self_attn.q_proj") for each in layers] == [8, 8, 3]


@pytest.mark.parametrize(
    "pattern",
    [
        *("q.proj", r"q\.proj", "q_proj", "self_attn.q_proj", r"self_attn\.q_proj", "attn.q_proj"),
        *("^q_proj", "^model.layers.1.self_attn.q_proj$", r"^model\.layers\.1\.self.attn\.q.proj"),
        *("model.layers.11.self_attn.q_proj", "x.model.layers.1.self_attn.q_proj", "q_proj$", "."),
    ],
)
def test_a_pattern_matches_the_names_that_peft_matches(pattern):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {pattern: 2}}
    ranks = parse_config(config)
    for module in ("model.layers.1.self_attn.q_proj", "q_proj", "model.layers.1.x.q.proj", "a"):
        is_matched = get_pattern_key([pattern], module) == pattern
        assert ranks.rank_of(module) == (2 if is_matched else 8), module


def test_a_tensor_that_cannot_be_used_is_named(folder, loaded):
    change_tensors(folder, **{f"{PREFIX}lm_head{DOWN}": torch.zeros(4, 96)})
    message = refusal(folder, loaded)
    assert "lm_head" in message
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in message


def test_an_embedding_of_an_adapter_is_refused(folder, loaded):
    name = f"{PREFIX}model.embed_tokens.lora_embedding_A"
    change_tensors(folder, **{name: torch.zeros(4, 320)})
    assert "lora_embedding_A" in refusal(folder, loaded)


def test_half_of_a_module_is_refused(folder, loaded):
    change_tensors(folder, **{Q + UP: None})
    assert f"lacks the tensor {Q + UP!r}" in refusal(folder, loaded)


@pytest.mark.parametrize(("name", "shape"), [(DOWN, (4, 95)), (DOWN, (5, 96)), (UP, (191, 4))])
def test_a_wrong_shape_is_refused_with_the_right_one(folder, loaded, name, shape):
    change_tensors(folder, **{Q + name: torch.zeros(shape)})
    right = (4, 96) if name == DOWN else (192, 4)
    assert f"{Q + name} has shape {shape}" in refusal(folder, loaded)
    assert str(right) in refusal(folder, loaded)


def test_integer_tensors_are_refused(folder, loaded):
    change_tensors(folder, **{Q + DOWN: torch.zeros(4, 96, dtype=torch.int8)})
    assert "type I8" in refusal(folder, loaded)


def test_a_rank_above_the_limit_is_refused_before_anything_is_read(folder, loaded):
    assert "rank 4 of model.layers" in refusal(folder, loaded, max_rank=3)
    assert "--max-lora-rank 3" in refusal(folder, loaded, max_rank=3)


def test_an_adapter_without_tensors_is_refused(folder, loaded):
    save_file({}, folder / WEIGHTS)
    assert "has no tensors" in refusal(folder, loaded)


def test_truncated_weights_are_refused_without_the_path(folder, loaded):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    message = refusal(folder, loaded)
    assert "adapter_model" in message
    assert str(folder) not in message


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"r": ' + b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused_without_its_content(folder, loaded, content):
    (folder / CONFIG).write_bytes(content)
    assert refusal(folder, loaded) in (
        f"{CONFIG} is not valid JSON",
        f"{CONFIG} is not a JSON object",
    )


def test_a_pickle_is_refused_with_a_hint(folder, loaded):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "is a pickle" in refusal(folder, loaded)


def test_a_directory_without_an_adapter_is_missing(folder, loaded):
    (folder / CONFIG).unlink()
    with pytest.raises(MissingAdapter, match=CONFIG):
        read(folder, loaded)


def test_the_digest_is_that_of_the_content(model, folder, loaded, tmp_path):
    first = read(folder, loaded)
    same = write_adapter(tmp_path / "copy", peft_model(model))
    other = write_adapter(tmp_path / "other", peft_model(model, seed=2))
    assert read(same, loaded).digest == first.digest
    assert read(other, loaded).digest != first.digest
    change_config(folder, lora_alpha=9)
    assert read(folder, loaded).digest != first.digest


def test_the_planned_memory_is_that_of_an_adapter_of_all_modules(model, loaded, tmp_path):
    adapter = read(write_adapter(tmp_path, peft_model(model, r=8)), loaded)
    assert adapter.num_bytes == adapter_bytes(loaded.spec, 8, 4)
    assert len(find_targets(loaded.spec)) == 7 * loaded.spec.num_layers


# ---- paths


def test_an_adapter_is_found_below_the_directory(folder, tmp_path):
    assert find_adapter("adapter", str(tmp_path)) == folder.resolve()
    assert find_adapter(str(folder), str(tmp_path)) == folder.resolve()
    assert find_adapter("adapter/../adapter/.", str(tmp_path)) == folder.resolve()


@pytest.mark.parametrize("path", ["..", "../other", "/etc", "missing", "a\0b", "x" * 5000, "loop"])
def test_other_paths_are_missing_whether_they_exist_or_not(folder, tmp_path, path):
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    folder.rename(other)
    (root / "loop").symlink_to("loop")
    with pytest.raises(MissingAdapter) as caught:
        find_adapter(path, str(root))
    assert caught.value.message == "there is no adapter at this path in the directory --lora-dir"


def test_links_out_of_the_directory_are_not_followed(folder, tmp_path):
    root, inside = tmp_path / "root", tmp_path / "root" / "inside"
    inside.mkdir(parents=True)
    (root / "link").symlink_to(folder)
    (inside / CONFIG).symlink_to(folder / CONFIG)
    for path in ("link", "inside"):
        with pytest.raises(MissingAdapter):
            find_adapter(path, str(root))
