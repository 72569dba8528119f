"""Triton's kernels between linears, in Triton's interpreter: they equal exact numbers and the torch
kernels, and write nothing for padding."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels import native_kernels
from tests.support.layer_checks import (
    ADD_NORMS,
    CPU,
    LAYER,
    MLPS,
    PLACES,
    POISON,
    AddNormCase,
    PlaceCase,
    check_activate,
    check_add_norm,
    check_cos_sin,
    check_place,
    poisoned_cache,
    random_place,
    random_slots,
    random_turn,
    wide_rows,
)
from tests.support.paged import PagedRow, attention_batch, scattered
from tests.support.random_decoder import HEAD_DIM, attention, mlp, model_spec, random_decoder
from tests.support.triton_code import interpreted
from tests.unit.test_whole_step import SPECS
from worker.attention.base import AttentionBatch
from worker.attention.torch_paged import TorchPagedAttention
from worker.device.cpuinfo import cpu_flags
from worker.device.triton_driver import reason_against_launches
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kernels.select import select_kernels
from worker.kv.cache import KVCache
from worker.kv.rounding import ROUNDED
from worker.layers.norm import Norm
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec, NormSpec
from worker.spec.rope_config import RopeConfig

tl: Any = importlib.import_module("triton.language")
interpreter: Any = importlib.import_module("triton.runtime.interpreter")
gpu: Any = interpreted("worker.kernels.gpu")
DEVICE_CODE = Path("worker/kernels/triton/layers.py")
CUDA = torch.device("cuda")
CONVERT = "_convert_float"
"""The interpreter's function that rounds. Triton has no public way to change its rounding."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.usefixtures("rounding_to_nearest", "new_tensors_are_nan"),
]


@pytest.fixture
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as GPUs do. It would cut off digits."""
    convert = getattr(interpreter, CONVERT)

    def rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.bfloat16:
            return convert(numbers, source, target, mode)
        nearest = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
        return nearest.view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)

    monkeypatch.setattr(interpreter, CONVERT, rounded)


@pytest.fixture
def new_tensors_are_nan() -> Iterator[None]:
    """`torch.empty` fills memory with NaN if torch is deterministic."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


KINDS = [("torch", torch.float32), ("triton", torch.float32), ("triton", torch.bfloat16)]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """Return kernels and a dtype. Those of torch have to be exact as well."""
    name, dtype = request.param
    return gpu.TritonKernels() if name == "triton" else TorchKernels(), dtype


# ---- Results.
@pytest.mark.parametrize("case", ADD_NORMS, ids=str)
def test_sums_and_norms_are_right(kind: tuple[Kernels, torch.dtype], case: AddNormCase) -> None:
    check_add_norm(kind[0], case, kind[1])


@pytest.mark.parametrize("case", [*PLACES, *map(random_place, range(6))], ids=str)
def test_heads_are_placed_right(kind: tuple[Kernels, torch.dtype], case: PlaceCase) -> None:
    check_place(kind[0], case, kind[1])


@pytest.mark.parametrize("mlp", MLPS, ids=lambda mlp: f"{mlp.activation} {mlp.is_gated}")
def test_activations_are_right(kind: tuple[Kernels, torch.dtype], mlp: MlpSpec) -> None:
    check_activate(kind[0], mlp, kind[1])


def test_an_activation_of_no_rows_is_empty(kind: tuple[Kernels, torch.dtype]) -> None:
    check_activate(kind[0], MLPS[0], kind[1], rows=0)


@pytest.mark.parametrize("width", [2, 24, 128])
def test_rotary_angles_are_right(kind: tuple[Kernels, torch.dtype], width: int) -> None:
    check_cos_sin(kind[0], width, kind[1])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_option_of_a_decoder_has_the_results_of_the_torch_kernels(spec: ModelSpec) -> None:
    blocks, results = scattered(8, 2, 3), []
    rows = [PagedRow(0, 1, blocks[0]), PagedRow(0, 3, blocks[1])]
    for kernels in (TorchKernels(), gpu.TritonKernels()):
        model = random_decoder(spec, kernels, torch.float32)
        cache = KVCache(
            spec.num_layers,
            8,
            4,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
            torch.float32,
            CPU,
        )
        attention = TorchPagedAttention(4, torch.float32)
        tokens = torch.tensor([3, 65, 7, 0])
        results.append(model(tokens, attention_batch(rows, 4), cache, attention))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


# ---- What the kernels leave to torch.
def test_rounded_keys_and_values_are_those_of_torch() -> None:
    case = PlaceCase(tokens=5, heads=4, kv_heads=2, head_dim=64, width=64)
    qkv, slots = wide_rows(5, 8 * 64, torch.float32, seed=5), random_slots(5, padding=2)
    caches = [poisoned_cache(case, ROUNDED) for _ in range(2)]
    queries = [
        kernels.place(qkv.clone(), random_turn(5, 64, qkv.dtype), cache, LAYER, slots)
        for kernels, cache in zip((TorchKernels(), gpu.TritonKernels()), caches, strict=True)
    ]
    assert torch.equal(*queries)
    assert torch.equal(caches[0].rows, caches[1].rows)
    assert (caches[0].k.flatten(1, 2)[LAYER] != POISON).any(-1).any(-1).sum() == 3


def test_layer_norms_are_those_of_torch() -> None:
    norm = Norm(NormSpec(kind="layer", eps=1e-5), torch.rand(96), torch.rand(96))
    x, delta = torch.rand(3, 96), torch.rand(3, 96)
    found = gpu.TritonKernels().add_norm(x, delta, norm)
    assert torch.equal(found, norm(x))


# ---- Launches.
class CountedLaunches:
    """Stands for the module of device code: counts the launches and computes nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, kernel: str) -> CountedLaunches:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> CountedLaunches:
        return self

    def __call__(self, **arguments: object) -> None:
        self.count += 1


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations on tensors, except views and new memory, which are no launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        # Such as `contiguous`, which may return its argument or a copy.
        is_view = func.is_view and not _is_new(result, args[0])
        if not is_view and name not in ("empty", "empty_like", "new_empty"):
            self.launched.append(name)
        return result


def _is_new(result: Any, argument: Tensor) -> bool:
    first = result if isinstance(result, Tensor) else result[0]
    return bool(first.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr())


class NoAttention:
    """An attention backend that launches nothing."""

    is_capturable = True

    def plan(self, batch: AttentionBatch, window: int | None = None, like: Any = None) -> None: ...

    def run(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.empty(q.shape, dtype=q.dtype)


LAYERS = {
    "Llama": LayerSpec(attention=attention(), mlp=mlp()),
    "Qwen 3": LayerSpec(attention=attention(qk_norm="head"), mlp=mlp()),
    "Gemma 3": LayerSpec(
        attention=attention(qk_norm="head", window=4), mlp=mlp(activation="gelu_tanh"), order="both"
    ),
    "Phi 3": LayerSpec(attention=attention(rope=RopeConfig(HEAD_DIM // 2, 1e4)), mlp=mlp()),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_has_four_launches_beside_linears_and_attention(
    layer: LayerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step also computes its rotary angles, its last sum, and the norm before the head."""
    norm = NormSpec(eps=1e-6, offset=1.0 if layer.order == "both" else 0.0)
    spec = model_spec(layer, layer, layer, norm=norm, residual_scale=0.4)
    model = random_decoder(spec, gpu.TritonKernels(), torch.bfloat16)
    cache = KVCache(
        3, 8, 4, spec.layer_heads[0].count, spec.layer_heads[0].dim, torch.bfloat16, CPU
    )
    batch = attention_batch([PagedRow(4, 1, [1, 2]), PagedRow(2, 1, [3, 0])], 4)
    device = CountedLaunches()
    monkeypatch.setattr(gpu, "layers", device)
    with CountedOperations() as operations:
        model.logits(model(torch.tensor([3, 5]), batch, cache, NoAttention()))
    assert device.count == 3 * 4 + 3
    assert Counter(operations.launched) == {
        "index_select": 1,  # of the embeddings
        "linear": 3 * 4 + 1,
        "to": 1,  # of the logits, to float32
    }


# ---- Mistakes.
def _sums(kernels: Kernels) -> None:
    case = AddNormCase(rows=3, size=90, post_norm=True, scale=0.4)
    for dtype in (torch.float32, torch.bfloat16):
        check_add_norm(kernels, case, dtype)


def _heads(kernels: Kernels) -> None:
    sizes = {"tokens": 4, "heads": 6, "kv_heads": 2, "head_dim": 96, "width": 24, "padding": 1}
    case = PlaceCase(qk_norm="head", **sizes)
    for dtype in (torch.float32, torch.bfloat16):
        check_place(kernels, case, dtype)


def _activations(kernels: Kernels, *, clamped: bool = False) -> None:
    chosen = [each for each in MLPS if (each.activation == "clamped_swiglu") == clamped]
    for each in chosen:
        for dtype in (torch.float32, torch.bfloat16):
            check_activate(kernels, each, dtype, rows=1)


def _angles(kernels: Kernels) -> None:
    check_cos_sin(kernels, 24, torch.float32)


Check = Callable[[Kernels], None]
_clamped = partial(_activations, clamped=True)


@pytest.mark.parametrize("check", [_sums, _heads, _activations, _clamped, _angles])
def test_kernels_without_a_mistake_pass(check: Check) -> None:
    check(gpu.TritonKernels())


MISTAKES: dict[str, tuple[str, str, Check]] = {
    "the mean includes the unused columns": ("values, 0) / SIZE", "values, 0) / BLOCK", _sums),
    "an epsilon is lost": ("/ SIZE + eps)", "/ SIZE)", _sums),
    "the sum is not stored": ("        tl.store(x, total, is_column)\n", "", _sums),
    "the sum is not rounded before the norm": (
        "total = _rounded(total + _rounded(added * scale, x), x)",
        "total = total + _rounded(added * scale, x)",
        _sums,
    ),
    "the post norm is not rounded": (
        "added = _rounded(_rms_norm(added, post_weight, post_eps, SIZE, BLOCK), x)",
        "added = _rms_norm(added, post_weight, post_eps, SIZE, BLOCK)",
        _sums,
    ),
    "the scale comes before the post norm": (
        "_rms_norm(added, post_weight",
        "_rms_norm(added * scale, post_weight",
        _sums,
    ),
    "a row is written beyond its end": ("(x, total, is_column)", "(x, total)", _sums),
    "padding is cached": ("elif slot >= 0:", "elif slot >= -1:", _heads),
    "heads turn the other way": (
        "_rounded(first * c, source) - second * s",
        "_rounded(first * c, source) + second * s",
        _heads,
    ),
    "a turn is not rounded": ("_rounded(second * c, source) +", "second * c +", _heads),
    "the norm is not rounded": (
        "return _rounded(items * inverse * factors, like)",
        "return items * inverse * factors",
        _heads,
    ),
    "the rest of a head is not in the mean": (
        "squares += tl.sum(others * others, 1, keep_dims=True)",
        "squares += 0.0",
        _heads,
    ),
    "keys are read from the values": ("k = qkv + H * D", "k = qkv + (H + H_KV) * D", _heads),
    "values are not cached": ("        tl.store(v_cache + to + item, v,", "        (v,", _heads),
    "keys get the norm of queries": ("is_head, k_weight,", "is_head, q_weight,", _heads),
    "up comes before the gate": ("up = tl.load(inner + SIZE,", "up = tl.load(inner,", _activations),
    "the activation is not rounded": (
        "_rounded(_activation(gate, ACTIVATION), out) * up",
        "_activation(gate, ACTIVATION) * up",
        _activations,
    ),
    "up has no lower limit": (
        "tl.minimum(tl.maximum(up, -limit), limit)",
        "tl.minimum(up, limit)",
        _clamped,
    ),
    "an angle is rounded to bfloat16": (
        "angle = tl.load(positions + token)",
        "angle = tl.load(positions + token).to(tl.bfloat16)",
        _angles,
    ),
    "the wrong half of sin is negated": ("sin + to, -s,", "sin + to, s,", _angles),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_kernel_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would fail, too."""
    right, wrong, check = MISTAKES[mistake]
    source = DEVICE_CODE.read_text()
    assert source.count(right) == 1
    name = "mistaken_" + mistake.replace(" ", "_")
    (tmp_path / f"{name}.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu, "layers", interpreted(name))
    with pytest.raises(AssertionError):
        check(gpu.TritonKernels())


# ---- Selection.
def test_a_gpu_gets_the_kernels_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.kernels.select.reason_against_launches", lambda: "")
    assert select_kernels("auto", CUDA, cpu_flags=frozenset()).name == "triton"
    assert select_kernels("avx2", CUDA, cpu_flags=frozenset()).name == "triton"


def test_torch_kernels_can_be_chosen_on_a_gpu() -> None:
    assert select_kernels("torch", CUDA, cpu_flags=frozenset()).name == "torch"


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an import of Triton fail, as if it was not installed."""
    reason_against_launches.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("gpu", "triton", "triton.layers"):
        monkeypatch.delitem(sys.modules, f"worker.kernels.{name}", raising=False)


@pytest.mark.usefixtures("no_triton")
def test_a_cpu_needs_no_triton() -> None:
    native = native_kernels().name
    assert select_kernels("auto", CPU, cpu_flags=cpu_flags()).name == native


@pytest.mark.usefixtures("no_triton")
def test_a_gpu_without_triton_gets_the_kernels_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert select_kernels("auto", CUDA, cpu_flags=frozenset()).name == "torch"
    assert caplog.text.count("Triton cannot be imported: ") == 1
    reason_against_launches.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_triton_that_cannot_launch_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As without a driver, without a C compiler, or with a cache that cannot be written."""
    reason_against_launches.cache_clear()
    assert select_kernels("auto", CUDA, cpu_flags=frozenset()).name == "torch"
    (line,) = caplog.messages
    assert "Triton cannot launch kernels: 0 active drivers" in line


def test_another_device_gets_the_kernels_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert select_kernels("auto", torch.device("mps"), cpu_flags=frozenset()).name == "torch"
    assert "do not support the device 'mps'" in caplog.text
