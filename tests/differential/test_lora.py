"""LoRA adapters against PEFT: adapters with random weights, for tiny checkpoints of all families
that can have them, give the same logprobs, on torch's kernels and on the compiled ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import (
    logprobs,
    new_table,
    peft_model,
    random_adapter,
    table_of,
    write_adapter,
)
from tests.support.checkpoints import random_llama, write_directory
from tests.support.eager import BLOCK_TOKENS, CPU, EagerStepper, assert_same, expected, some_tokens
from tests.support.family_models import FULL, MAMBA, MODEL_TYPES, OWN_SIZES, RECURRENT, random_model
from tests.support.gguf_files import write_gguf
from tests.support.kernels import FLOAT_NAMES, native_kernels
from tests.support.replica import load
from tests.support.same_bits import DENSE, small_model
from tests.support.wrapper_models import random_wrapper, write_wrapper
from worker.attention.select import select_attention
from worker.loading.decoder import LoadedModel, load_model
from worker.lora.table import StepAdapters
from worker.lora.targets import find_targets
from worker.models.compiled import why_not
from worker.models.whole_step import WholePass
from worker.spec.model_spec import ModelSpec
from worker.spec.wrappers import text_name

KERNELS = {"torch": None, "compiled": native_kernels}
MAX_ERROR = 1e-4
REFUSED_BY_PEFT = dict.fromkeys(
    ("NemotronHForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"),
    "out_proj",
)
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": [MAMBA, "mlp", FULL, "mlp", MAMBA, "mlp"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "deepseek_v32": {"first_k_dense_replace": 0},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"] * 4},
    "kimi_linear": {"mlp_layer_types": ["sparse"] * 4},
    "llama4_text": {"interleave_moe_layer_step": 1},
}
"""Changes after which no model has both experts and other MLPs: PEFT would adapt the experts too,
because the names of their modules end as those of the other MLPs do."""


def adapted_modules(loaded: LoadedModel) -> list[str]:
    """Return the last parts of the names of the modules that adapters can change."""
    found = dict.fromkeys(name.rpartition(".")[2] for name in find_targets(loaded.spec))
    refused = REFUSED_BY_PEFT.get(loaded.spec.architecture)
    return [name for name in found if name != refused]


def write_model(path: Path, model_type: str) -> Any:
    """Write a random model, and return transformers' model."""
    # With larger weights, float32 logits of transformers itself are 1e-4 from those in float64.
    narrow = dict.fromkeys(("gemma", "gemma2"), 0.06) | dict.fromkeys(RECURRENT, 0.03)
    narrow |= {"qwen3_5_moe_text": 0.02}
    spread = narrow.get(model_type, 0.1)
    sizes: dict[str, Any] = {"hidden_size": 192, "initializer_range": spread}
    if "head_dim" in OWN_SIZES.get(model_type, {}):
        sizes["head_dim"] = 32
    if "moe_intermediate_size" in OWN_SIZES.get(model_type, {}):
        sizes["moe_intermediate_size"] = 64
    theirs = random_model(model_type, **sizes, **WITHOUT_EXPERTS.get(model_type, {}))
    write_directory(path, theirs)
    return theirs


def load_for(path: Path, kernels: str) -> LoadedModel:
    make = KERNELS[kernels]
    return load_model(
        path,
        dtype=torch.float32,
        device=CPU,
        kernels=None if make is None else make(),
        weights="dense" if make is None else "packed",
    )


def written(path: Path, model_type: str, kernels: str) -> tuple[Any, LoadedModel]:
    """Write a random model, and load it. Return transformers' model and ours."""
    return write_model(path, model_type), load_for(path, kernels)


def stepper(loaded: LoadedModel, tokens: list[list[int]], table: Any, rows: list[int]) -> Any:
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    return EagerStepper(loaded, tokens, attention, table=table, adapters=rows)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logprobs_are_those_of_peft_in_chunks_and_token_by_token(
    tmp_path: Path, model_type: str
) -> None:
    theirs = write_model(tmp_path / "model", model_type)
    models = {kernels: load_for(tmp_path / "model", kernels) for kernels in KERNELS}
    spec = models["compiled"].spec
    assert isinstance(spec, ModelSpec)
    assert models["torch"].model.whole is None
    assert isinstance(models["compiled"].model.whole, WholePass) == (not why_not(spec))
    adapted = peft_model(theirs, modules=adapted_modules(models["compiled"]))
    adapter, tokens = write_adapter(tmp_path / "adapter", adapted), some_tokens(90)
    right, plain = (logprobs(expected(model, tokens)) for model in (adapted, theirs))
    assert (right - plain).abs().max() > 0.1, "the adapter changes the model"
    for loaded in models.values():
        table = table_of(loaded, [adapter])
        for steps in [(90,)], [(7,), (1,), (60,), (12,), *[(1,)] * 10]:
            ours = stepper(loaded, [tokens], table, [0]).run(steps)[0]
            assert_same(logprobs(ours), right, MAX_ERROR)


@pytest.mark.parametrize("architecture", ["SmolVLM", "Qwen2_5_VL", "Glm4v"])
def test_an_adapter_of_a_whole_model_of_images_changes_its_text_part(
    tmp_path: Path, architecture: str
) -> None:
    """PEFT names its modules as they are called inside the whole model."""
    kinds = {"SmolVLM": "llama", "Qwen2_5_VL": "qwen2_5_vl_text", "Glm4v": "glm4v_text"}
    kind = kinds[architecture]
    theirs = random_wrapper(f"{architecture}ForConditionalGeneration", kind)
    loaded = load(write_wrapper(tmp_path, theirs))
    ends = ("q_proj", "v_proj", "down_proj")
    names = [name for name, _ in theirs.named_modules() if name.endswith(ends)]
    adapted = peft_model(theirs, modules=[name for name in names if text_name(name) is not None])
    table = table_of(loaded, [write_adapter(tmp_path / "adapter", adapted)])
    tokens = some_tokens(40)
    right, plain = (logprobs(expected(model, tokens)) for model in (adapted, theirs))
    assert (right - plain).abs().max() > 0.1, "the adapter changes the model"
    ours = stepper(loaded, [tokens], table, [0]).run([(39,), (1,)])[0]
    assert_same(logprobs(ours), right, MAX_ERROR)


CONFIGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 13": {"r": 13},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "scaled by the root": {"use_rslora": True},
    "ranks and alphas by module": {
        "rank_pattern": {"q_proj": 9, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3, r"^model\.layers\.0\.self_attn\.o_proj": 20},
    },
    "some modules": {"modules": ["v_proj", "up_proj"]},
    "one module": {"modules": ["k_proj"]},
    "some layers": {"layers_to_transform": [1, 3]},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CONFIGS)
def test_options_of_the_config_have_the_effect_they_have_in_peft(
    tmp_path: Path, case: str, kernels: str
) -> None:
    theirs, loaded = written(tmp_path / "model", "llama", kernels)
    adapted = peft_model(theirs, **CONFIGS[case])
    table = table_of(loaded, [write_adapter(tmp_path / "adapter", adapted)])
    tokens = some_tokens(40)
    right = logprobs(expected(adapted, tokens))
    ours = stepper(loaded, [tokens], table, [0]).run([(39,), (1,)])[0]
    assert_same(logprobs(ours), right, MAX_ERROR)


@pytest.mark.parametrize("kernels", KERNELS)
def test_requests_of_one_batch_get_the_adapters_that_they_name(
    tmp_path: Path, kernels: str
) -> None:
    theirs, loaded = written(tmp_path / "model", "qwen2", kernels)
    models = [peft_model(theirs, seed=seed, r=1 + 3 * seed) for seed in range(8)]
    folders = [write_adapter(tmp_path / str(n), model) for n, model in enumerate(models)]
    requests = [some_tokens(30 + 3 * n, seed=n) for n in range(10)]
    rows = [3, -1, 0, 7, 1, 5, -1, 2, 6, 4]
    batch = stepper(loaded, requests, table_of(loaded, folders), rows)
    chunk = [20 if n % 2 else 1 for n in range(10)]
    rest = [len(tokens) - n - 1 for tokens, n in zip(requests, chunk, strict=True)]
    found = batch.run([tuple(chunk), tuple(rest), (1,) * 10])
    for tokens, row, ours in zip(requests, rows, found, strict=True):
        model = theirs if row < 0 else models[row]
        assert_same(logprobs(ours), logprobs(expected(model, tokens)), MAX_ERROR)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_of_the_checkpoint_fits_its_gguf_file(tmp_path: Path, kernels: str) -> None:
    """A GGUF file has other names, and the rows of queries and keys in another order."""
    theirs = random_llama(hidden_size=192, initializer_range=0.1)
    loaded = load_for(write_gguf(tmp_path / "tiny.gguf", theirs), kernels)
    adapted = peft_model(theirs)
    table = table_of(loaded, [write_adapter(tmp_path / "adapter", adapted)])
    tokens = some_tokens(40)
    ours = stepper(loaded, [tokens], table, [0]).run([(30,), *[(1,)] * 10])[0]
    assert_same(logprobs(ours), logprobs(expected(adapted, tokens)), MAX_ERROR)


@pytest.mark.parametrize("instructions", FLOAT_NAMES)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(DENSE, torch.float32), (DENSE, torch.bfloat16), ("Q4_1-int8", torch.bfloat16)],
    ids=str,
)
def test_the_compiled_terms_are_those_of_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
    instructions: str,
) -> None:
    """In one call for the whole step, and in one for each operation. One of the adapters has a rank
    and outputs that are no multiple of a vector's width."""
    loaded = small_model(tmp_path, kind, dtype, instructions)
    table = new_table(
        loaded, [random_adapter(loaded, seed=seed, rank=3 + 6 * seed) for seed in range(3)]
    )
    requests = [some_tokens(count, seed=count) for count in (40, 7, 25, 1)]
    attention = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=loaded.model.kernels)
    steps = [(30, 7, 1, 0), (1, 0, 24, 1), (9, 0, 0, 0)]

    def run() -> torch.Tensor:
        eager = EagerStepper(
            loaded, requests, attention, dtype=dtype, table=table, adapters=[2, -1, 0, 1]
        )
        return logprobs(torch.cat(eager.run(steps)))

    in_one_call = run()
    loaded.model.whole = None
    one_by_one = run()
    monkeypatch.setattr(StepAdapters, "for_layer", lambda self, layer, _: partial(self.add, layer))
    expected = run()
    for compiled in (in_one_call, one_by_one):
        assert_same(compiled, expected, 1e-4 if dtype == torch.float32 else 0.3)
        if dtype == torch.bfloat16:
            assert (compiled - expected).abs().mean() < 0.06


@pytest.mark.parametrize("kernels", ["whole", "eager"])
def test_an_adapter_with_nan_changes_no_bit_of_other_requests(tmp_path: Path, kernels: str) -> None:
    loaded = small_model(tmp_path, DENSE, torch.float32, FLOAT_NAMES[-1])
    if kernels == "eager":
        loaded.model.whole = None
    good, bad = (random_adapter(loaded, seed=seed, rank=5) for seed in range(2))
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    requests = [some_tokens(count, seed=count) for count in (20, 7, 9)]
    steps = [(12, 7, 1), (1, 0, 8), (7, 0, 0)]

    def run() -> list[torch.Tensor]:
        table = new_table(loaded, [good, bad])
        eager = EagerStepper(loaded, requests, attention, table=table, adapters=[0, 1, -1])
        return eager.run(steps)

    before = run()
    for term in bad.terms.values():
        for tensor in term.tensors():
            tensor.fill_(torch.nan)
    after = run()
    assert before[1].isfinite().all()
    assert after[1].isnan().any()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
