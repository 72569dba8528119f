"""The files of encoders: families, module files of sentence-transformers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from protocol.config.worker import WorkerConfig
from tests.support.encoder_models import (
    MODERN,
    encode_inputs,
    random_encoder,
    some_inputs,
    tiny_word_tokenizer,
    write_encoder,
    write_modules,
)
from worker.encoders.header import EncoderHeader
from worker.encoders.position_bias import alibi_slopes
from worker.encoders.ragged import LENGTH_RATIO, LENGTH_SLACK, group_ends
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.errors import UnusableModel
from worker.loading.encoder import load_encoder
from worker.loading.header import encoder_header, read_any_header
from worker.startup.preflight import preflight


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_modules(write_encoder(tmp_path, random_encoder("bert")), "mean")


def header_of(path: Path) -> EncoderHeader:
    header = encoder_header(path)
    assert header is not None
    return header


def changed(path: Path, **fields: Any) -> Path:
    """Change fields of a JSON file, or with the value `...` remove them."""
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value != ...}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        read_any_header(path)
    return refused.value.message


# ---- Jina's BERT v2, which transformers does not have


def jina_reference(tensors: dict[str, Tensor], ids: list[int], layers: int, heads: int) -> Tensor:
    """Return the hidden states of one input as the model's authors describe them: BERT without
    positions, with a bias of the scores and a gated MLP."""

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return layer_norm(x, weight.shape, weight, bias, 1e-12)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))

    def split(x: Tensor) -> Tensor:
        return x.view(len(ids), heads, -1).transpose(0, 1)

    x = tensors["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    distance = (torch.arange(len(ids))[:, None] - torch.arange(len(ids))).abs()
    bias = -torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    for index in range(layers):
        at = f"encoder.layer.{index}."
        q, k, v = (split(linear(x, f"{at}attention.self.{n}")) for n in ("query", "key", "value"))
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        seen = (weights @ v).transpose(0, 1).flatten(1)
        x = norm(x + linear(seen, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        gate, up = linear(x, f"{at}mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(gelu(gate) * up, f"{at}mlp.wo"), f"{at}mlp.layernorm")
    return x


JINA = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "auto_map": {"AutoModel": "x--modeling_bert.JinaBertModel"},
}


def write_jina(path: Path, heads: int) -> dict[str, Tensor]:
    """Write a tiny model of Jina's BERT v2, made from a BERT. Return its tensors."""
    model = random_encoder("bert", num_attention_heads=heads)
    write_modules(write_encoder(path, model), "mean")
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path / "model.safetensors")
    del tensors["embeddings.position_embeddings.weight"]
    for index in range(model.config.num_hidden_layers):
        at = f"encoder.layer.{index}."
        del tensors[f"{at}intermediate.dense.weight"], tensors[f"{at}intermediate.dense.bias"]
        gated = torch.randn(2 * 80, 48, generator=generator) * 0.2
        tensors[f"{at}mlp.gated_layers.weight"] = gated
        for old, new in (("output.dense", "mlp.wo"), ("output.LayerNorm", "mlp.layernorm")):
            for end in ("weight", "bias"):
                tensors[f"{at}{new}.{end}"] = tensors.pop(f"{at}{old}.{end}")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    changed(path / "config.json", **JINA)
    return tensors


@pytest.mark.parametrize("heads", [4, 6])
def test_vectors_of_jinas_bert_equal_its_description(heads: int, tmp_path: Path) -> None:
    tensors = write_jina(tmp_path, heads)
    changed(tmp_path / "config.json", max_position_embeddings=8192)
    loaded = load_encoder(header_of(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    inputs = some_inputs([5, 1, 600, 9, 8])  # 600 is beyond a tile of queries
    with torch.inference_mode():
        found = EncodeRunner(EncoderModel(loaded.model, loaded.vectors)).encode(
            encode_inputs(inputs)
        )
    means = [jina_reference(tensors, ids, 4, heads).mean(0) for ids in inputs]
    wanted = torch.nn.functional.normalize(torch.stack(means), dim=-1)
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
    ],
)
def test_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes)


def test_groups_of_inputs_have_similar_lengths() -> None:
    import numpy as np

    lengths = np.sort(np.array([1, 1, 2, 9, 10, 11, 40, 41, 90, 500, 500, 512]))
    first = 0
    for end in group_ends(lengths):
        group = lengths[first:end]
        assert group[-1] <= LENGTH_RATIO * group[0] + LENGTH_SLACK
        first = end
    assert first == len(lengths)


# ---- module files


def test_the_card_has_what_clients_need(bert: Path) -> None:
    settings = {
        "prompts": {"query": "Q: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    write_modules(bert, "cls", settings=settings, max_tokens=100)
    encoding = header_of(bert).encoding
    assert (encoding.task, encoding.size, encoding.max_tokens) == ("embed", 48, 100)
    assert (encoding.pooling, encoding.normalizes, encoding.similarity) == ("cls", True, "dot")
    assert encoding.prompts == {"query": "Q: ", "document": ""}
    assert encoding.default_prompt == "query"


def test_an_operators_pooling_replaces_that_of_the_files(bert: Path) -> None:
    header = read_any_header(bert, "cls")
    assert isinstance(header, EncoderHeader)
    assert header.encoding.pooling == "cls"


def test_positions_of_mpnet_start_in_the_third_row(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("mpnet", pad_token_id=0))
    assert header_of(tmp_path).spec.context_tokens == 320 - 2


def test_positions_of_roberta_start_after_the_padding(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("roberta", pad_token_id=1))
    assert header_of(tmp_path).spec.context_tokens == 320 - 2


MODULE_FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "max pooling": ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
    "two poolings": ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "2 poolings"),
    "no pooling": ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "0 poolings"),
    "another size": ("1_Pooling/config.json", {"word_embedding_dimension": 9}, "the model has 48"),
    "a prompt that is left out": ("1_Pooling/config.json", {"include_prompt": False}, "include"),
    "a text instead of a flag": (
        "1_Pooling/config.json",
        {"pooling_mode_mean_tokens": "yes"},
        "not true or false",
    ),
}


@pytest.mark.parametrize("name", MODULE_FAULTS)
def test_a_module_that_is_not_supported_is_refused_by_name(name: str, bert: Path) -> None:
    file, fields, words = MODULE_FAULTS[name]
    changed(bert / file, **fields)
    assert words in refusal(bert)


MODULE_LISTS: dict[str, tuple[list[dict[str, str]], str]] = {
    "an unknown module": ([{"type": "x.Transformer"}, {"type": "x.LSTM"}], "'LSTM'"),
    "no pooling": ([{"type": "x.Transformer"}], "no module of type Pooling"),
    "a path outside": (
        [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "../x"}],
        "outside",
    ),
    "an absolute path": (
        [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "/x"}],
        "outside",
    ),
    "a module after the last": (
        [
            {"type": "x.Transformer"},
            {"type": "x.Pooling", "path": "1_Pooling"},
            {"type": "x.Normalize"},
            {"type": "x.Dense"},
        ],
        "after Normalize",
    ),
    "no list": ([], "not a list of modules"),
}


@pytest.mark.parametrize("name", MODULE_LISTS)
def test_a_bad_list_of_modules_is_refused(name: str, bert: Path) -> None:
    modules, words = MODULE_LISTS[name]
    (bert / "modules.json").write_text(json.dumps(modules))
    assert words in refusal(bert)


def test_a_dense_module_in_a_pickle_is_refused(bert: Path) -> None:
    write_modules(bert, "mean", dense=True)
    (bert / "2_Dense" / "model.safetensors").unlink()
    assert "pickle files are not read" in refusal(bert)


def test_a_dense_module_of_another_shape_is_refused(bert: Path) -> None:
    write_modules(bert, "mean", dense=True)
    save_file({"linear.weight": torch.zeros(3, 48)}, bert / "2_Dense" / "model.safetensors")
    assert "requires" in refusal(bert)


def test_lower_case_is_left_to_the_tokenizer(bert: Path) -> None:
    lengths = {"max_seq_length": 64, "do_lower_case": True}
    (bert / "sentence_bert_config.json").write_text(json.dumps(lengths))
    assert "do_lower_case" in refusal(bert)
    changed(bert / "tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": True})
    assert header_of(bert).encoding.max_tokens == 64


def test_a_default_prompt_must_exist(bert: Path) -> None:
    write_modules(bert, "mean", settings={"prompts": {}, "default_prompt_name": "query"})
    assert "no prompt 'query'" in refusal(bert)


# ---- configs and tensors


CONFIG_FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "relative positions": ("bert", {}, {"position_embedding_type": "relative_key"}, "relative_key"),
    "a decoder": ("bert", {}, {"is_decoder": True}, "is_decoder"),
    "other buckets": (
        "mpnet",
        {},
        {"relative_attention_num_buckets": 64},
        "relative_attention_num_buckets 64",
    ),
    "a mixture of experts": ("nomic_bert", {}, {"moe_every_n_layers": 2}, "moe_every_n_layers 2"),
    "another gate": ("nomic_bert", {}, {"activation_function": "geglu"}, "activation_function"),
    "biases": ("nomic_bert", {}, {"qkv_proj_bias": True}, "qkv_proj_bias True"),
    "another head dimension": ("nomic_bert", {}, {"head_dim": 4}, "head_dim 4"),
    "a scaled base": (
        "nomic_bert",
        {},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0, "factor": 2.0}},
        "'yarn'",
    ),
    "an unknown activation": ("bert", {}, {"hidden_act": "mish"}, "mish"),
    "heads that do not divide": ("bert", {}, {"num_attention_heads": 5}, "5 heads"),
    "a null": ("bert", {}, {"hidden_size": None}, "null"),
    "no window": ("modernbert", MODERN, {"local_attention": 1}, "local_attention"),
    "a scaled rope": (
        "modernbert",
        MODERN,
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 9.0}}},
        "dynamic",
    ),
    "an unknown kind of layer": ("modernbert", MODERN, {"layer_types": ["x"] * 4}, "'x'"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_config_that_is_not_supported_is_refused_by_field(name: str, tmp_path: Path) -> None:
    kind, sizes, fields, words = CONFIG_FAULTS[name]
    write_encoder(tmp_path, random_encoder(kind, **sizes))
    changed(tmp_path / "config.json", **fields)
    assert words in refusal(tmp_path)


def test_a_missing_and_an_unexpected_tensor_are_refused_by_name(bert: Path) -> None:
    file = bert / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "adapter.weight": torch.zeros(2)}, file)
    assert "unexpected tensors: adapter.weight" in refusal(bert)
    del tensors["encoder.layer.2.output.dense.bias"]
    save_file(tensors, file)
    assert "'encoder.layer.2.output.dense.bias' is missing" in refusal(bert)


def test_a_model_that_classifies_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("bert", scores=True, num_labels=3))
    assert "a model with 3 labels classifies" in refusal(tmp_path)


def test_an_unknown_function_of_a_score_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("bert", scores=True, num_labels=1))
    changed(tmp_path / "config.json", sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    assert "activation_fn 'torch.nn.Tanh' is not supported" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["deberta-v2", "jina_embeddings_v3"])
def test_an_encoder_that_is_not_supported_is_refused_with_the_reason(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert f"{kind!r} is not supported: " in refusal(tmp_path)


# ---- the plan of its memory


def plan_of(path: Path, **options: Any) -> Any:
    found = preflight([WorkerConfig(model=str(path), device="cpu", **options)])
    return found


def test_a_model_that_only_encodes_needs_no_cache(bert: Path) -> None:
    found = plan_of(bert)
    assert not found.error
    (plan,) = found.plans
    assert (plan.dtype, plan.kv_bytes, plan.max_len) == ("float32", 0, 320)
    parameters = sum(tensor.numel() for tensor in load_file(bert / "model.safetensors").values())
    pooler = 48 * 48 + 48
    assert plan.weights_bytes == 4 * (parameters - pooler)
    assert found.card is not None
    assert found.card.encoding is not None
    assert not found.card.generates


def test_the_plan_has_room_for_the_biases_of_scores(tmp_path: Path) -> None:
    for kind in ("roberta", "mpnet"):
        write_encoder(tmp_path / kind, random_encoder(kind, pad_token_id=1))
    plain, biased = (plan_of(tmp_path / kind).plans[0] for kind in ("roberta", "mpnet"))
    tile = 6 * 318 * 1024  # heads, queries of the longest input, tokens of a step
    assert biased.work_bytes - plain.work_bytes == 4 * 2 * tile


def test_options_that_need_a_cache_are_refused(bert: Path) -> None:
    assert "--kv-host-gib is not possible" in plan_of(bert, kv_host_gib=1.0).error
    assert "--draft-model is not possible" in plan_of(bert, draft_model="x").error


def test_a_limit_beyond_the_model_is_refused(bert: Path) -> None:
    assert "the model's context is 320 tokens" in plan_of(bert, max_len=321).error


def test_a_scorer_has_no_pooling(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("bert", scores=True, num_labels=1))
    assert "has no pooling to choose" in plan_of(tmp_path, pooling="mean").error


def test_the_tokenizer_of_the_tests_marks_pairs() -> None:
    encoding = tiny_word_tokenizer().encode("w1", "w2 w3")
    assert encoding.type_ids == [0, 0, 0, 1, 1, 1]
