"""A model gives the same answers on the compiled kernels as in torch. Also the choice of
kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.config.worker import Activations, KernelSet
from tests.support.checkpoints import random_llama, write_directory
from tests.support.kernels import NAMES, assert_near, native_kernels, randn
from tests.support.paged import PagedRow, attention_batch, scattered
from tests.support.same_bits import small_model
from worker.attention.select import select_attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.device.cpuinfo import cpu_flags
from worker.device.machine import cpu_name
from worker.errors import UnusableModel
from worker.kernels import library, prepacked
from worker.kernels.base import Kernels
from worker.kernels.fingerprint import fingerprint, source_of
from worker.kernels.instruction_sets import INSTRUCTION_SETS
from worker.kernels.library import NoKernels, runnable
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear, pack
from worker.kernels.reference import TorchKernels
from worker.kernels.select import select_kernels
from worker.kv.cache import KVCache
from worker.layers.hybrid_linear import NEVER
from worker.loading.decoder import LoadedModel, load_model, open_weights
from worker.loading.header import ModelHeader, read_header
from worker.loading.weight_layout import layout, narrowed
from worker.loading.weights import load_weights
from worker.models.decoder import DecoderModel

CPU = torch.device("cpu")
BLOCK_TOKENS = 4


def load(path: Path, kernels: Kernels, dtype: torch.dtype, form: str = "auto") -> LoadedModel:
    return load_model(path, dtype=dtype, device=CPU, kernels=kernels, weights=form)  # type: ignore[arg-type]


def answers(loaded: LoadedModel) -> list[Tensor]:
    """Return the logits of two steps, and the K/V cache after them. The first step computes two
    prompts. The second one mixes a decode row and a chunk."""
    config = loaded.spec
    blocks = scattered(16, 4, 4)
    dtype = getattr(torch, loaded.card.dtype)
    shape = (
        config.num_layers,
        16,
        BLOCK_TOKENS,
        config.layer_heads[0].count,
        config.layer_heads[0].dim,
    )
    cache = KVCache(*shape, dtype, CPU)
    attention = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=loaded.model.kernels)
    steps = [
        [PagedRow(0, 9, blocks[0]), PagedRow(0, 5, blocks[1])],
        [PagedRow(9, 1, blocks[0]), PagedRow(5, 8, blocks[1])],
    ]
    results = []
    for rows in steps:
        count = sum(row.count for row in rows)
        tokens = torch.arange(count) * 7 % config.vocab_size
        batch = attention_batch(rows, BLOCK_TOKENS)
        assert isinstance(loaded.model, DecoderModel)
        results.append(loaded.model.logits(loaded.model(tokens, batch, cache, attention)))
    return [*results, cache.k.float(), cache.v.float()]


@pytest.fixture(params=[False, True], ids=["plain", "with biases"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    bias = request.param
    model = random_llama(attention_bias=bias, mlp_bias=bias, tie_word_embeddings=not bias)
    return write_directory(tmp_path, model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["packed", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_kernels_compute_what_torch_computes(
    directory: Path, name: str, form: str, dtype: torch.dtype
) -> None:
    """With packed weights, one call computes all layers. With dense weights, each operation is a
    call of its own."""
    ours = load(directory, native_kernels(name), dtype, form)
    theirs = load(directory, TorchKernels(), dtype)
    assert ours.card.num_parameters == theirs.card.num_parameters
    for one, other in zip(answers(ours), answers(theirs), strict=True):
        if dtype is torch.float32:
            assert_near(one, other)
        else:  # every layer rounds, so results differ in their last bits
            torch.testing.assert_close(one, other, rtol=0, atol=0.03 * float(other.abs().max()))


def test_dense_copies_are_offered_only_if_onednn_can_make_them() -> None:
    try:
        prepacked.Prepacked(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    except RuntimeError:
        assert not prepacked.is_possible()
    else:
        assert prepacked.is_possible()


@pytest.mark.skipif(
    not prepacked.is_possible(), reason="needs a processor that oneDNN reorders bfloat16 for"
)
@pytest.mark.parametrize("from_rows", [1, 10, 100])
def test_steps_of_many_rows_use_dense_weights_with_the_same_answers(
    directory: Path, from_rows: int
) -> None:
    """The steps have 14 and 9 rows, so both, one or none of them use dense weights."""
    kernels = native_kernels()
    header = read_header(directory)
    assert isinstance(header, ModelHeader)
    form = layout(kernels, "both", torch.bfloat16)
    weights = load_weights(
        header.tensors, open_weights(header), dtype=torch.bfloat16, device=CPU, layout=form
    )
    linears = [getattr(*slot) for layer in weights.layers for slot in layer.linears]
    for linear in linears:
        assert linear.finalize(from_rows) is linear
    head: Any = weights.head
    weights.head = head.finalize(NEVER)
    packed = load(directory, kernels, torch.bfloat16, "packed")
    both = replace(packed, model=DecoderModel(header.spec, weights, kernels))
    ours, theirs = answers(both), answers(packed)
    assert torch.equal(ours[0], theirs[0]) == (from_rows > 14)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.03 * float(other.abs().max()))
    x = randn(20, header.spec.hidden, dtype=torch.bfloat16)
    first = linears[0]
    for rows in (1, 9, 10, 20):
        expected = first.dense if rows >= from_rows else first.packed
        assert torch.equal(first(x[:rows]), expected(x[:rows]))


def test_a_card_names_the_kernels_and_dtype_on_which_bits_depend(directory: Path) -> None:
    kernels = native_kernels()
    own = load(directory, kernels, torch.bfloat16).card.numerics
    assert own == load(directory, native_kernels(), torch.bfloat16).card.numerics != ""
    others = {
        load(directory, kernels, torch.float32).card.numerics,
        load(directory, kernels, torch.bfloat16, "dense").card.numerics,
        load(directory, TorchKernels(), torch.bfloat16).card.numerics,
    }
    assert own not in others
    assert len(others) == 2
    assert "" in others, "torch's operations promise no bits"


def test_kernels_of_another_source_have_another_fingerprint(tmp_path: Path) -> None:
    found = set()
    for content in (b"one build", b"another build"):
        library = tmp_path / "unknown.so"
        library.write_bytes(content)
        found.add(source_of(0, library))
        assert source_of(0x1A, library) == "1a", "the file counts only if the source is not known"
    assert len({fingerprint(each, 0, "float32", rounded=()) for each in (*found, "1a")}) == 3


def test_a_model_too_small_to_measure_has_no_dense_copies(directory: Path) -> None:
    loaded = load(directory, native_kernels(), torch.bfloat16, "both")
    assert loaded.step_costs == []
    assert all(isinstance(layer.mixer.qkv, PackedLinear) for layer in loaded.model.weights.layers)
    assert isinstance(loaded.model.weights.head, PackedLinear)
    assert loaded.model.whole.is_for(1 << 20)


def test_a_model_that_the_kernels_do_not_support_runs_on_torch(tmp_path: Path) -> None:
    path = write_directory(tmp_path, random_llama(hidden_size=72, head_dim=24))
    loaded = load(path, native_kernels(), torch.float32)
    assert isinstance(loaded.model.kernels, TorchKernels)
    with pytest.raises(UnusableModel, match="packed weights need"):
        load(path, native_kernels(), torch.float32, "packed")


@pytest.mark.parametrize("kernels", NAMES)
def test_numbers_of_bfloat16_give_a_float32_model_the_same_bits_in_half_of_the_memory(
    kernels: KernelSet,
) -> None:
    native = native_kernels(kernels)
    weight = randn(70, 544, dtype=torch.bfloat16).float()
    x = randn(13, 544, dtype=torch.float32)
    narrow = narrowed(weight)
    assert narrow.dtype == torch.bfloat16
    wide, half = (PackedLinear(native, pack(native, each)) for each in (weight, narrow))
    for rows in (1, 7, 13):
        assert torch.equal(half(x[:rows]), wide(x[:rows]))
    assert 1.9 < wide.matrix.memory.nbytes / half.matrix.memory.nbytes < 2


def test_numbers_that_are_not_of_bfloat16_stay_as_they_are() -> None:
    weight = randn(130, 32, dtype=torch.bfloat16).float()
    weight[-1, -1] = 1 + 2**-8
    assert narrowed(weight) is weight
    assert torch.equal(narrowed(weight[:-1]), weight[:-1].bfloat16())


@pytest.mark.parametrize(
    ("activations", "dtype", "rounds_floats", "kernels", "rounds"),
    [
        ("auto", torch.bfloat16, False, "avx2", True),
        ("auto", torch.bfloat16, False, "generic", False),
        ("auto", torch.float32, False, "avx2", False),
        ("auto", torch.float32, True, "avx2", True),
        ("auto", torch.float32, True, "generic", False),
        ("int8", torch.bfloat16, False, "generic", True),
        ("int8", torch.float32, False, "avx2", True),
        ("bfloat16", torch.bfloat16, False, "avx2", False),
        ("bfloat16", torch.float32, True, "avx2", False),
    ],
)
def test_inputs_are_rounded_on_request_or_if_integers_are_faster(
    tmp_path: Path,
    activations: Activations,
    dtype: torch.dtype,
    rounds_floats: bool,
    kernels: KernelSet,
    rounds: bool,
) -> None:
    small_model(tmp_path, "Q4_1", dtype)
    loaded = load_model(
        tmp_path / "small.gguf",
        dtype=dtype,
        device=CPU,
        kernels=native_kernels(kernels),
        activations=activations,
        rounds_floats=rounds_floats,
    )
    assert isinstance(loaded.model, DecoderModel)
    weights = loaded.model.weights
    for linear in (weights.layers[0].mixer.qkv, weights.head):
        assert isinstance(linear, PackedLinear)
        assert linear.matrix.struct.rounds_inputs == rounds
    assert [*loaded.rounded] == (["inputs"] if rounds else [])


def test_without_quantised_weights_nothing_is_rounded_and_the_option_changes_no_bits(
    tmp_path: Path,
) -> None:
    path = write_directory(tmp_path, random_llama())
    options: Any = {"dtype": torch.bfloat16, "device": CPU, "kernels": native_kernels("avx2")}
    plain, int8 = (load_model(path, **options, activations=each) for each in ("bfloat16", "int8"))
    assert plain.card.numerics
    assert plain.card.numerics == int8.card.numerics
    assert [*int8.rounded] == []
    rounded = load_model(path, **options, kv_dtype="int8")
    assert [*rounded.rounded] == ["kv"]
    assert rounded.card.numerics != plain.card.numerics


def test_a_processor_can_run_the_instruction_sets_whose_flags_it_has() -> None:
    flags = frozenset({"avx2", "fma", "f16c", "sse2"})
    assert [each.name for each in runnable(flags)] == ["avx2", "generic"]
    assert [each.name for each in runnable(flags | {"avx_vnni"})] == ["avxvnni", "avx2", "generic"]
    assert [each.name for each in runnable(frozenset())] == ["generic"]
    every = frozenset().union(*(each.needs for each in INSTRUCTION_SETS))
    assert runnable(every) == list(INSTRUCTION_SETS)


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("fp asimd evtstrm aes crc32 cpuid", ["generic"]),  # Cortex-A72: Raspberry Pi 4
        ("fp asimd aes crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp", ["neon", "generic"]),
        ("fp asimd crc32 atomics asimdhp asimddp sve i8mm bf16", ["i8mm", "neon", "generic"]),
    ],
)
def test_the_features_of_an_arm_processor_select_its_sets(
    tmp_path: Path, features: str, names: list[str]
) -> None:
    part = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd0c\n"
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {features}\n{part}"
    )
    assert [each.name for each in runnable(cpu_flags(tmp_path / "cpuinfo"))] == names
    assert cpu_name(tmp_path / "cpuinfo") == f"0x41, 0xd0c, {features}"


def test_an_instruction_set_that_the_processor_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnusableModel, match="cannot run kernels 'avx512'"):
        select_kernels("avx512", CPU, cpu_flags=frozenset({"avx2", "fma", "f16c"}))


def test_without_compiled_kernels_torch_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    kernels = select_kernels("auto", CPU, cpu_flags=cpu_flags())
    assert isinstance(kernels, TorchKernels)
    assert isinstance(
        select_attention(4, dtype=torch.float32, kernels=kernels), TorchPagedAttention
    )
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install with a C++ compiler" in caplog.text
    with pytest.raises(UnusableModel, match="no kernels are compiled for generic"):
        select_kernels("generic", CPU, cpu_flags=cpu_flags())


def test_a_library_that_is_not_the_best_of_this_processor_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = native_kernels("generic").file
    (tmp_path / compiled.name).symlink_to(compiled)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    kernels = select_kernels("auto", CPU, cpu_flags=frozenset({"avx2", "fma", "f16c"}))
    assert isinstance(kernels, NativeKernels)
    assert "using kernels for generic, because none are compiled for avx2" in caplog.text


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native_kernels()
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    with pytest.raises(NoKernels, match="another version"):
        library.load(runnable(cpu_flags()))


def test_kernels_compute_in_the_threads_of_torch() -> None:
    """The kernels use the OpenMP runtime of torch, so the process has one set of threads."""
    native_kernels()
    found = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if Path(line.split()[-1]).name.startswith("libgomp")
    }
    of_torch = {path for path in found if path.startswith(str(Path(torch.__file__).parent))}
    path = library.loaded_runtime()
    assert path in (of_torch or found)
    assert ctypes.CDLL(path).omp_get_max_threads() == torch.get_num_threads()
