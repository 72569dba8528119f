"""Every architecture that transformers computes with our attention: tiny random checkpoints give
the same logits as with transformers' own attention, however the work is cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import SamplingParams
from tests.support.checkpoints import write_directory
from tests.support.eager import (
    BLOCK_TOKENS,
    CPU,
    EagerStepper,
    assert_same,
    expected,
    load,
    some_tokens,
)
from tests.support.kernels import native_kernels
from tests.support.replica import Replica
from tests.support.transformers_models import COMPUTED, random_model
from worker.attention.native_paged import NativePagedAttention
from worker.attention.select import select_attention
from worker.errors import UnusableModel
from worker.kv.cache import KVCache
from worker.loading.decoder import load_model
from worker.loading.header import read_header
from worker.loading.transformers_header import TransformersHeader
from worker.models.hf import TransformersModel
from worker.spec.architectures import BORROWED
from worker.startup.memory_plan import PlannedTransformersModel, weights_bytes
from worker.startup.preflight import preflight

NUM_TOKENS = 61


def tolerance(logits: torch.Tensor) -> float:
    return 1e-4 * max(1.0, float(logits.abs().max()) / 10)


@pytest.mark.parametrize("model_type", COMPUTED)
def test_logits_are_those_of_transformers_alone(tmp_path: Path, model_type: str) -> None:
    """A request is computed whole, in chunks, token by token, and in a batch with two others."""
    theirs, tokens = random_model(model_type), some_tokens(NUM_TOKENS)
    requests = [some_tokens(count, seed=count) for count in (50, 9, 33)]
    alone = [expected(theirs, each) for each in (tokens, *requests)]
    loaded = load(write_directory(tmp_path, theirs))
    for steps in [(61,)], [(7,), (1,), (30,), (23,)], [(40,), *[(1,)] * 21]:
        ours = EagerStepper(loaded, [tokens]).run(steps)[0]
        assert_same(ours, alone[0], tolerance(alone[0]))
    batched = [(20, 8, 0), (1, 1, 30), (28, 0, 1), (1, 0, 1), (0, 0, 1)]
    for ours, logits in zip(EagerStepper(loaded, requests).run(batched), alone[1:], strict=True):
        assert_same(ours, logits, tolerance(logits))


@pytest.mark.parametrize("model_type", sorted(COMPUTED.keys() & BORROWED.keys()))
def test_a_type_that_another_class_computes_is_read_as_published(
    tmp_path: Path, model_type: str
) -> None:
    """Files have the names of tensors of their publisher, and so does `architectures`."""
    theirs, tokens = random_model(model_type), some_tokens(NUM_TOKENS)
    file = write_directory(tmp_path, theirs) / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [BORROWED[model_type][1]]}
    file.write_text(json.dumps(config))
    first = {"exaone": "transformer.wte.weight", "sarvam_moe": "model.word_embeddings.weight"}
    with safe_open(tmp_path / "model.safetensors", "pt") as files:
        assert first.get(model_type, "model.embed_tokens.weight") in files.keys()  # noqa: SIM118
    logits = expected(theirs, tokens)
    ours = EagerStepper(load(tmp_path), [tokens]).run([(20,), (41,)])[0]
    assert_same(ours, logits, tolerance(logits))


NATIVE = {"gpt_bigcode": {"hidden_size": 192}}
"""Model type -> values that give a head dim which the compiled kernels support."""


@pytest.mark.parametrize("model_type", ["cohere2_moe", "flint", "gpt_bigcode", "vaultgemma"])
def test_the_compiled_kernels_compute_attention(tmp_path: Path, model_type: str) -> None:
    theirs = random_model(model_type, **NATIVE.get(model_type, {}))
    path, tokens = write_directory(tmp_path, theirs), some_tokens(NUM_TOKENS)
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=native_kernels())
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    assert isinstance(attention, NativePagedAttention)
    logits = expected(theirs, tokens)
    for steps in [(61,)], [(7,), (1,), (30,), (23,)]:
        ours = EagerStepper(loaded, [tokens], attention).run(steps)[0]
        assert_same(ours, logits, 3 * tolerance(logits))


@pytest.mark.parametrize("model_type", ["codegen", "falcon", "gpt_neo", "gptj", "vaultgemma"])
def test_bfloat16_is_as_exact_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    """Some of these classes compute queries and keys in float32."""
    theirs, tokens = random_model(model_type), some_tokens(NUM_TOKENS)
    path, exact = write_directory(tmp_path, theirs), expected(theirs, tokens)
    loaded = load_model(path, dtype=torch.bfloat16, device=CPU)
    attention = select_attention(BLOCK_TOKENS, dtype=torch.bfloat16)
    stepper, spec = EagerStepper(loaded, [tokens], attention), loaded.spec
    shape = (spec.num_layers, stepper.cache.num_blocks, BLOCK_TOKENS, spec.num_kv_heads)
    stepper.cache = KVCache(*shape, spec.head_dim, torch.bfloat16, CPU)
    ours = stepper.run([(30,), (1,), (30,)])[0]
    rounded = expected(theirs.to(torch.bfloat16), tokens).float()
    assert (ours - exact).norm() <= 1.5 * (rounded - exact).norm() + 0.01 * exact.norm()


def test_keys_and_values_in_eight_bits_change_the_logits_a_little(tmp_path: Path) -> None:
    theirs, tokens = random_model("olmo"), some_tokens(NUM_TOKENS)
    path, exact = write_directory(tmp_path, theirs), expected(theirs, tokens)
    loaded = load_model(path, dtype=torch.float32, device=CPU, kv_dtype="int8")
    stepper, spec = EagerStepper(loaded, [tokens]), loaded.spec
    shape = (spec.num_layers, stepper.cache.num_blocks, BLOCK_TOKENS, spec.num_kv_heads)
    stepper.cache = KVCache(*shape, spec.head_dim, loaded.kv_dtype, CPU)
    ours = stepper.run([(30,), (1,), (30,)])[0]
    assert 0 < (ours - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("model_type", ["olmo", "internlm3"])
def test_rotary_scalings_are_computed(tmp_path: Path, model_type: str) -> None:
    ropes: dict[str, dict[str, Any]] = {
        "olmo": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0},
        "internlm3": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 6.0},
    }
    rope = ropes[model_type] | {"original_max_position_embeddings": 128}
    theirs, tokens = random_model(model_type, rope_parameters=rope), some_tokens(NUM_TOKENS)
    loaded = load(write_directory(tmp_path, theirs))
    logits = expected(theirs, tokens)
    ours = EagerStepper(loaded, [tokens]).run([(7,), (1,), (30,), (23,)])[0]
    assert_same(ours, logits, tolerance(logits))


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("olmo"), random_model("olmo"))


@pytest.mark.parametrize("speculation", ["none", "ngram", "model"])
def test_answers_are_those_of_transformers_with_drafts_and_preemption(
    olmo: Path, speculation: str
) -> None:
    """The prompts share their first tokens, so the prefix cache is used as well."""
    theirs = transformers.OlmoForCausalLM.from_pretrained(olmo).eval()
    start = some_tokens(20)
    prompts = [start + some_tokens(count, seed=count) for count in (3, 9, 15, 21)]
    replica = Replica(
        load(olmo),
        token_budget=16,
        num_blocks=28,
        block_tokens=BLOCK_TOKENS,
        options={"speculation": speculation},
        draft=load(olmo) if speculation == "model" else None,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = [*replica.answers(prompts[:1], params), *replica.answers(prompts[1:], params)]
    stats = replica.engine.stats()
    assert stats.num_preemptions > 0
    assert speculation != "model" or stats.num_accepted_tokens > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


def test_the_planned_weights_are_those_that_are_loaded(olmo: Path) -> None:
    header = read_header(olmo)
    assert isinstance(header, TransformersHeader)
    planned = weights_bytes(PlannedTransformersModel(header.name, header.spec), "float32")
    card = load(olmo).card
    assert 0 <= card.weights_bytes - planned < 10_000  # buffers, such as rotary frequencies
    assert card.num_parameters * 4 == planned


def test_the_check_before_the_start_plans_the_memory(olmo: Path) -> None:
    found = preflight([WorkerConfig(model=str(olmo), max_slots=4, device="cpu", dtype="float32")])
    assert not found.error
    (plan,) = found.plans
    assert (plan.architecture, plan.context_tokens) == ("OlmoForCausalLM", 512)
    assert plan.weights_bytes == load(olmo).card.num_parameters * 4
    assert plan.kv_bytes > 0


def test_outputs_that_the_config_asks_for_are_not_computed(olmo: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(olmo, tmp_path / "olmo"))
    config = json.loads((path / "config.json").read_text())
    config |= {"output_attentions": True, "output_hidden_states": True, "return_dict": False}
    (path / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(NUM_TOKENS)
    plain, changed = (EagerStepper(load(each), [tokens]).run([(61,)])[0] for each in (olmo, path))
    assert torch.equal(plain, changed)


def refusal(path: Path, **config: Any) -> str:
    """Change fields of the model's config.json, and return the error of loading the model."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(UnusableModel) as refused:
        load(path)
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 5}, "tensor 'model.layers.4."),
        ({"num_hidden_layers": 3}, "is not a tensor of the model"),
        ({"intermediate_size": 128}, "mlp.down_proj.weight' has another shape"),
        ({"hidden_size": "many"}, "transformers cannot read config.json"),
        ({"num_attention_heads": 7}, "transformers"),
    ],
)
def test_files_that_do_not_fit_the_class_are_refused(
    olmo: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    path = Path(shutil.copytree(olmo, tmp_path / "olmo"))
    assert message in refusal(path, **config)


def test_code_beside_the_weights_is_never_run(
    olmo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, mark = Path(shutil.copytree(olmo, tmp_path / "olmo")), tmp_path / "was run"
    for name in ("modeling_olmo.py", "configuration_olmo.py", "__init__.py"):
        (path / name).write_text(f"open({str(mark)!r}, 'w')")
    named = {"AutoConfig": "configuration_olmo.C", "AutoModelForCausalLM": "modeling_olmo.M"}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    load(path)
    assert not mark.exists()
    assert "names code of the model's directory (auto_map), which is never run" in caplog.text


def test_an_adapter_beside_the_weights_is_refused(olmo: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(olmo, tmp_path / "olmo"))
    (path / "adapter_config.json").write_text("{}")
    assert "describes an adapter" in refusal(path)


def test_without_transformers_the_extra_is_named(
    olmo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.loading.transformers_header.find_spec", lambda _: None)
    with pytest.raises(UnusableModel, match="transformers, which is not installed") as refused:
        read_header(olmo)
    assert "[transformers]" in refused.value.remedy


def test_tensor_parallelism_is_refused(olmo: Path) -> None:
    found = preflight([WorkerConfig(model=str(olmo), world_size=2, local_size=2)])
    assert "does not support models that transformers computes" in found.error


def test_packed_weights_are_refused(olmo: Path) -> None:
    with pytest.raises(UnusableModel, match="packed weights are not possible"):
        load_model(olmo, dtype=torch.float32, device=CPU, weights="packed")


ATTENTION: dict[str, dict[str, Any]] = {
    "a mask": {"attention_mask": torch.zeros(1, 1, 2, 2)},
    r"it has \[5\] sinks for 6 heads": {"s_aux": torch.zeros(5)},
    "'position_bias'": {"position_bias": torch.zeros(6)},
    "later tokens": {"is_causal": False},
    "a window of 0 tokens": {"sliding_window": 0},
}


@pytest.mark.parametrize(("message", "arguments"), ATTENTION.items())
def test_an_argument_that_our_attention_does_not_compute_is_refused(
    olmo: Path, message: str, arguments: dict[str, Any]
) -> None:
    loaded = load(olmo)
    assert isinstance(loaded.model, TransformersModel)
    function = loaded.model.function

    def changed(*states: Any, **named: Any) -> Any:
        return function(*states[:4], **(named | arguments))

    transformers.AttentionInterface.register(function.name, changed)
    with pytest.raises(UnusableModel, match=message):
        EagerStepper(loaded, [[1, 2]]).step(2)
