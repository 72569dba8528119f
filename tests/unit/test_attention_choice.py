"""The choice of an attention backend: by GPU, by model, and by the libraries that can be loaded."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from protocol.config.worker import AttentionBackend
from tests.support import flash_contract
from tests.support.flash_contract import FA2_SCHEMA, FA3_SCHEMA, LibraryRules, registered
from tests.support.kernels import native_kernels
from worker.attention import flash_library
from worker.attention.base import Attention
from worker.attention.flash import FlashPagedAttention
from worker.attention.flash_library import FA2_OPERATOR, FA3_OPERATOR, FlashOperator, load_operator
from worker.attention.limits import (
    FA2_LIMITS,
    FA3_LIMITS,
    VARLEN_LIMITS,
    AttentionNeeds,
    FlashLimits,
    NoBackend,
)
from worker.attention.native_paged import NativePagedAttention
from worker.attention.select import BACKENDS, GpuBackend, choose_backend, select_attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.device import triton_driver
from worker.device.cpuinfo import cpu_flags
from worker.errors import UnusableModel
from worker.kernels.library import load, runnable
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from worker.startup.attention_needs import attention_needs, version_of

HOPPER = AttentionNeeds(
    platform="cuda",
    capability=(9, 0),
    num_processors=132,
    torch_version=(2, 13),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    num_heads=32,
    head_dim=128,
    block_tokens=16,
    has_sinks=False,
    has_soft_cap=False,
)
AMPERE = replace(HOPPER, capability=(8, 6))
ALL = frozenset({"FA3", "FA2", "varlen_attn", "triton", "torch"})


def chosen(
    needs: AttentionNeeds, installed: frozenset[str], wanted: AttentionBackend = "auto"
) -> tuple[str, list[str]]:
    """Return the name of the backend that is chosen, and the reasons against others."""

    def load(backend: GpuBackend) -> Attention:
        if backend.name not in installed:
            raise NoBackend("not installed")
        return TorchPagedAttention(16, torch.float32)

    found = choose_backend(wanted, needs, load)
    return found.name, [*found.reasons]


@pytest.mark.parametrize(
    ("needs", "missing", "wanted", "name", "reasons"),
    [
        (HOPPER, "", "auto", "FA3", []),
        (HOPPER, "FA3", "auto", "FA2", ["FA3: not installed"]),
        (HOPPER, "FA3 FA2", "auto", "triton", ["FA3: not installed", "FA2: not installed"]),
        (HOPPER, "FA3 FA2", "flash", "varlen_attn", None),
        (HOPPER, "", "triton", "triton", []),
        (HOPPER, "", "torch", "torch", []),
        (
            AMPERE,
            "",
            "auto",
            "FA2",
            ["FA3: this GPU has compute capability 8.6; it supports only 9.x"],
        ),
        (replace(HOPPER, capability=(10, 0)), "", "auto", "FA2", None),
        (replace(HOPPER, capability=(7, 5)), "", "auto", "torch", None),
        (replace(HOPPER, platform="rocm", capability=(0, 0)), "", "auto", "triton", None),
        (replace(HOPPER, torch_version=(2, 9)), "", "auto", "triton", None),
        (replace(HOPPER, dtype="float32", kv_dtype="float32"), "", "auto", "triton", None),
        (replace(HOPPER, kv_dtype="int8"), "", "auto", "torch", None),
        (replace(HOPPER, head_dim=512), "", "auto", "triton", None),
        (replace(HOPPER, head_dim=320), "", "auto", "torch", None),
        (replace(HOPPER, head_dim=576), "", "auto", "torch", None),
        (replace(HOPPER, head_dim=100), "", "auto", "triton", None),
        (replace(HOPPER, block_tokens=8), "FA3", "auto", "triton", None),
        (replace(HOPPER, block_tokens=8), "", "auto", "FA3", []),
        (replace(HOPPER, has_sinks=True), "", "auto", "FA3", []),
        (replace(HOPPER, has_sinks=True), "FA3", "auto", "triton", None),
        (replace(HOPPER, has_sinks=True, num_heads=96), "", "auto", "triton", None),
        (replace(HOPPER, has_soft_cap=True), "FA3", "auto", "FA2", None),
    ],
)
def test_the_first_backend_that_supports_gpu_and_model_is_chosen(
    needs: AttentionNeeds,
    missing: str,
    wanted: AttentionBackend,
    name: str,
    reasons: list[str] | None,
) -> None:
    large = replace(needs, block_tokens=256) if name == "varlen_attn" else needs
    found, why = chosen(large, ALL - {*missing.split()}, wanted)
    assert found == name
    assert reasons is None or why == reasons


@pytest.mark.parametrize(
    ("changed", "limits", "reason"),
    [
        ({"platform": "rocm", "capability": (0, 0)}, FA3_LIMITS, "it needs an NVIDIA GPU"),
        (
            {"capability": (10, 0)},
            FA3_LIMITS,
            "this GPU has compute capability 10.0; it supports only 9.x",
        ),
        (
            {"capability": (7, 5)},
            FA2_LIMITS,
            "this GPU has compute capability 7.5; it supports 8.0 and later",
        ),
        ({"torch_version": (2, 9)}, FA3_LIMITS, "torch is 2.9; it needs 2.10 or later"),
        ({"torch_version": (2, 12)}, VARLEN_LIMITS, "torch is 2.12; it needs 2.13 or later"),
        ({"dtype": "float32"}, FA3_LIMITS, "the dtype is float32; it needs bfloat16"),
        ({"kv_dtype": "int8"}, FA3_LIMITS, "the KV cache is in int8"),
        ({"head_dim": 288}, FA3_LIMITS, "the head dim is 288; it needs a multiple of 8 up to 256"),
        ({"block_tokens": 8}, FA2_LIMITS, "--block-tokens is 8; it needs a multiple of 16"),
        ({"block_tokens": 16}, VARLEN_LIMITS, "--block-tokens is 16; it needs a multiple of 256"),
        ({"has_sinks": True}, FA2_LIMITS, "it does not support attention sinks"),
        (
            {"has_sinks": True, "num_heads": 65},
            FA3_LIMITS,
            "the model has 65 heads with sinks; it supports at most 64",
        ),
        (
            {"has_soft_cap": True, "block_tokens": 256},
            VARLEN_LIMITS,
            "it does not support soft caps",
        ),
    ],
)
def test_the_reason_against_a_library_names_what_it_lacks(
    changed: dict[str, Any], limits: FlashLimits, reason: str
) -> None:
    assert limits.reason_against(replace(HOPPER, block_tokens=256)) is None
    assert reason in str(limits.reason_against(replace(HOPPER, **changed)))


@pytest.mark.parametrize(
    ("limits", "rules"),
    [
        (FA3_LIMITS, flash_contract.FA3),
        (FA2_LIMITS, flash_contract.FA2),
        (VARLEN_LIMITS, flash_contract.VARLEN),
    ],
)
def test_the_limits_of_a_library_are_those_of_its_twin(
    limits: FlashLimits, rules: LibraryRules
) -> None:
    assert limits.block_multiple == rules.block_multiple
    assert limits.max_sink_heads == rules.max_sink_heads
    assert limits.has_soft_cap == rules.has_soft_cap


def test_every_value_of_the_option_selects_a_backend_and_is_in_the_documentation() -> None:
    values = set(get_args(AttentionBackend)) - {"auto"}
    page = (Path(__file__).parents[2] / "docs" / "operate" / "gpus.md").read_text(encoding="utf-8")
    table = page.split("\n## Attention\n")[1].split("\n## ")[0]
    assert {backend.option for backend in BACKENDS} == values
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == values


def test_a_backend_that_is_asked_for_and_missing_is_refused_with_all_reasons() -> None:
    with pytest.raises(UnusableModel) as refused:
        chosen(AMPERE, ALL - {"FA2"}, "flash")
    assert refused.value.message == (
        "--attention flash cannot be used: FA3: this GPU has compute capability 8.6; it supports "
        "only 9.x; FA2: not installed; "
        "varlen_attn: --block-tokens is 16; it needs a multiple of 256"
    )
    assert refused.value.remedy == "serve with --attention auto"


# ---- The CPU.
def test_on_the_cpu_attention_belongs_to_the_kernels() -> None:
    kernels = native_kernels()
    assert isinstance(
        select_attention(4, dtype=torch.float32, kernels=kernels), NativePagedAttention
    )
    assert isinstance(select_attention(4, dtype=torch.float32), TorchPagedAttention)


def test_on_the_cpu_torchs_attention_can_be_asked_for() -> None:
    found = select_attention(4, dtype=torch.float32, kernels=native_kernels(), wanted="torch")
    assert isinstance(found, TorchPagedAttention)


@pytest.mark.parametrize("wanted", ["flash", "triton"])
def test_on_the_cpu_a_gpus_attention_is_refused(wanted: AttentionBackend) -> None:
    with pytest.raises(UnusableModel, match="needs a GPU, but the device is the CPU") as refused:
        select_attention(4, dtype=torch.float32, wanted=wanted)
    assert refused.value.remedy == "serve with --attention auto"


# ---- Libraries.
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of libraries, the only one that is searched."""
    monkeypatch.setattr(flash_library, "INSTALLED", ())
    return tmp_path


def reason_against(folder: Path, described: FlashOperator = FA3_OPERATOR) -> str:
    with pytest.raises(NoBackend) as refused:
        load_operator(described, [folder])
    reason = str(refused.value)
    assert "\n" not in reason
    return reason


def test_a_missing_library_is_reported_with_the_command_that_fetches_it(folder: Path) -> None:
    assert reason_against(folder) == "not installed (see: tidegate fetch-kernels --help)"


def test_a_file_that_is_no_library_is_reported_with_the_loaders_message(folder: Path) -> None:
    (folder / FA3_OPERATOR.file).write_text("not a library")
    reason = reason_against(folder)
    assert f"{folder / FA3_OPERATOR.file} cannot be loaded: " in reason
    assert "file too short" in reason or "invalid ELF header" in reason


def test_a_broken_file_does_not_hide_one_in_the_next_directory(folder: Path) -> None:
    native_kernels()  # skips the test if there are none
    *_, compiled = load(runnable(cpu_flags()))
    places = [folder / "first", folder / "second"]
    for place in places:
        place.mkdir()
    (places[0] / FA2_OPERATOR.file).write_text("not a library")
    shutil.copy(compiled, places[1] / FA2_OPERATOR.file)
    with pytest.raises(NoBackend, match=f"second/{FA2_OPERATOR.file} has no operator"):
        load_operator(FA2_OPERATOR, places)


def test_a_library_without_the_operator_is_reported(folder: Path) -> None:
    native_kernels()  # skips the test if there are none
    *_, compiled = load(runnable(cpu_flags()))
    shutil.copy(compiled, folder / FA3_OPERATOR.file)
    assert reason_against(folder).endswith("has no operator 'fwd'")


def test_an_operator_with_other_arguments_is_not_called(folder: Path) -> None:
    with registered(FA3_OPERATOR.namespace, FA3_SCHEMA.replace("int sm_margin, ", "")):
        assert "has other arguments than expected" in reason_against(folder)


@pytest.mark.parametrize(
    ("described", "schema"), [(FA3_OPERATOR, FA3_SCHEMA), (FA2_OPERATOR, FA2_SCHEMA)]
)
def test_an_operator_that_is_registered_already_is_not_loaded_again(
    folder: Path, described: FlashOperator, schema: str
) -> None:
    (folder / described.file).write_text("not a library")
    with registered(described.namespace, schema):
        packet = getattr(getattr(torch.ops, described.namespace), described.name)
        assert load_operator(described, [folder]) is packet.default


def test_installed_packages_are_searched_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tide_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_library, "INSTALLED", (("tide_engine", "libs"), ("tide_gone", "")))
    assert flash_library.installed_folders() == [package / "libs"]


def test_a_broken_library_is_one_line_in_the_log_and_the_next_backend_is_chosen(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for described in (FA3_OPERATOR, FA2_OPERATOR):
        (folder / described.file).write_text("not a library")
    needs = replace(HOPPER, block_tokens=8)
    found = select_attention(8, dtype=torch.bfloat16, gpu=needs, libraries=folder)
    assert not isinstance(found, FlashPagedAttention)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("attention=")
    assert "; FA3: " in line
    assert "cannot be loaded" in line
    assert "; FA2: --block-tokens is 8; it needs a multiple of 16" in line
    assert "\n" not in line


def test_a_library_that_loads_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with registered(FA3_OPERATOR.namespace, FA3_SCHEMA):
        found = select_attention(16, dtype=torch.bfloat16, gpu=HOPPER, libraries=folder)
    assert isinstance(found, FlashPagedAttention)
    assert caplog.messages == ["attention=FA3"]


def test_triton_that_cannot_launch_is_one_line_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(triton_driver, "reason_against_launches", lambda: "no C compiler")
    found = select_attention(16, dtype=torch.bfloat16, gpu=AMPERE, libraries=folder)
    assert isinstance(found, TorchPagedAttention)
    (line,) = caplog.messages
    assert line.startswith("attention=torch; FA3: ")
    assert line.endswith("; triton: no C compiler")


def test_triton_is_made_for_the_blocks_and_the_processors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_driver, "reason_against_launches", lambda: "")
    made = SimpleNamespace(TritonPagedAttention=lambda *sizes, **named: (sizes, named))
    monkeypatch.setitem(sys.modules, "worker.attention.triton_paged", made)  # type: ignore[arg-type]
    found: Any = select_attention(16, dtype=torch.bfloat16, gpu=AMPERE, wanted="triton")
    assert found == ((16,), {"num_processors": 132})


def test_torchs_own_function_is_used_if_it_is_asked_for(folder: Path) -> None:
    needs = replace(HOPPER, block_tokens=256)
    if version_of(torch.__version__) < VARLEN_LIMITS.torch_version:
        pytest.skip("this torch has no block tables")
    found = select_attention(256, dtype=torch.bfloat16, gpu=needs, libraries=folder, wanted="flash")
    assert isinstance(found, FlashPagedAttention)


# ---- What a model needs.
def spec_of(*attentions: AttentionSpec) -> ModelSpec:
    return ModelSpec(
        architecture="tide",
        vocab_size=8,
        hidden=64,
        context_tokens=64,
        layers=tuple(
            LayerSpec(attention=each, mlp=MlpSpec(intermediate=64)) for each in attentions
        ),
        norm=NormSpec(eps=1e-5),
    )


PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=None, scale=0.25)


def needs_of(spec: ModelSpec, device: str = "cuda:0") -> AttentionNeeds | None:
    return attention_needs(
        spec,
        torch.device(device),
        block_tokens=32,
        dtype=torch.bfloat16,
        kv_dtype=torch.int8,
    )


def set_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    properties = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_needs_of_a_model_are_those_of_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    set_processors(monkeypatch, 142)
    odd = replace(PLAIN, num_heads=8, soft_cap=30.0)
    assert needs_of(spec_of(PLAIN, odd)) == AttentionNeeds(
        platform="cuda",
        capability=(8, 9),
        num_processors=142,
        torch_version=version_of(torch.__version__),
        dtype="bfloat16",
        kv_dtype="int8",
        num_heads=8,
        head_dim=16,
        block_tokens=32,
        has_sinks=False,
        has_soft_cap=True,
    )
    assert needs_of(spec_of(PLAIN, replace(PLAIN, sinks=True))).has_sinks


def test_a_gpu_of_amd_has_no_compute_capability_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    set_processors(monkeypatch, 304)
    needs = needs_of(spec_of(PLAIN))
    assert (needs.platform, needs.capability) == ("rocm", (0, 0))


def test_a_model_on_the_cpu_needs_nothing_of_a_gpu() -> None:
    assert needs_of(spec_of(PLAIN), "cpu") is None


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13)), ("2.14.1", (2, 14)), ("3.0a0+git", (3, 0))]
)
def test_a_version_is_its_first_two_numbers(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version
