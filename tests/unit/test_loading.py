"""Model directories of Hugging Face: the card agrees with the files, and bad files are refused."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from protocol.engine.model_card import SamplingDefaults
from tests.support.checkpoints import TEMPLATE, VOCAB, random_llama, tiny_tokenizer, write_directory
from worker.checkpoint import digest as digests
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel, load_model, open_weights
from worker.loading.header import ModelHeader, read_header


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("models") / "tiny", random_llama())


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, which a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype, device=torch.device("cpu"))


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file. A field whose new value is None is removed."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {k: v for k, v in (values | fields).items() if v is not None}
    path.write_text(json.dumps(values))


def refusal(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        load(path)
    assert "\n" not in refused.value.message
    return refused.value.message


def test_the_card_holds_all_fields_of_the_directory(directory: Path) -> None:
    change(
        directory / "generation_config.json",
        eos_token_id=[0, 5],
        temperature=0.7,
        top_k=20,
        min_p=0.05,
    )
    card = load(directory, torch.bfloat16).card
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    assert (card.vocab_size, card.context_tokens) == (VOCAB, 512)
    assert card.tokenizer == (directory / "tokenizer.json").read_bytes()
    assert card.eos_token_ids == [0, 5, 2]  # from generation_config.json, then from the tokenizer
    assert (card.bos_token_id, card.pad_token_id) == (1, None)
    assert card.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    assert card.chat_template == TEMPLATE
    assert card.defaults == SamplingDefaults(temperature=0.7, top_k=20, min_p=0.05)
    parameters = sum(p.numel() for p in random_llama().parameters())
    assert (card.dtype, card.num_parameters) == ("bfloat16", parameters)
    assert card.weights_bytes == 2 * parameters


def test_tied_embeddings_are_one_tensor_that_is_counted_once(tmp_path: Path) -> None:
    model = random_llama(tie_word_embeddings=True)
    loaded = load(write_directory(tmp_path, model))
    assert next(loaded.model.weights.head.tensors()) is next(
        loaded.model.weights.embedding.tensors()
    )
    assert loaded.card.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_template_file_takes_precedence_over_the_tokenizer_config(directory: Path) -> None:
    settings = directory / "tokenizer_config.json"
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    change(settings, chat_template=several)
    assert load(directory).card.chat_template == "D"
    change(settings, chat_template=[several[0]])
    assert load(directory).card.chat_template is None
    (directory / "chat_template.jinja").write_text("J")
    assert load(directory).card.chat_template == "J"


def test_a_template_in_a_file_of_a_processor_is_the_last_choice(directory: Path) -> None:
    (directory / "chat_template.json").write_text('{"chat_template": "P"}')
    for own, expected in (("T", "T"), (None, "P")):
        change(directory / "tokenizer_config.json", chat_template=own)
        assert load(directory).card.chat_template == expected


def test_the_template_for_conversations_with_tools_is_found_by_its_name(directory: Path) -> None:
    named = {"default": "D", "tool_use": "T", "rag": "R"}
    several = [{"name": name, "template": source} for name, source in named.items()]
    for templates in (several, named):
        change(directory / "tokenizer_config.json", chat_template=templates)
        card = load(directory).card
        assert (card.chat_template, card.tool_use_template) == ("D", "T")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    card = load(directory).card
    assert (card.chat_template, card.tool_use_template) == (None, "U")
    (directory / "chat_template.jinja").write_text("J")
    card = load(directory).card
    assert (card.chat_template, card.tool_use_template) == ("J", "U")


def test_the_card_has_the_response_template(directory: Path) -> None:
    assert load(directory).card.response_template is None
    described = {"fields": {"content": {"close": "</s>é"}}}
    change(directory / "tokenizer_config.json", response_template=described)
    template = load(directory).card.response_template
    assert template is not None
    assert json.loads(template) == described


def test_the_digest_depends_on_weights_tokenizer_and_config_but_not_on_the_path(
    directory: Path, original: Path
) -> None:
    same = load(original).card.digest
    assert load(directory).card.digest == same
    change(directory / "config.json", rms_norm_eps=2e-5)
    other_config = load(directory).card.digest
    change(directory / "tokenizer.json", version="1.1")
    other_tokenizer = load(directory).card.digest
    weights = directory / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert len({same, other_config, other_tokenizer, load(directory).card.digest}) == 4


def test_the_digest_of_a_large_file_covers_its_size_both_ends_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "FULL_BYTES", 0)
    monkeypatch.setattr(digests, "HEAD_BYTES", 16)
    monkeypatch.setattr(digests, "SAMPLE_BYTES", 4)
    monkeypatch.setattr(digests, "NUM_SAMPLES", 10)
    file = tmp_path / "weights"
    seen = set()
    for changed in (None, 0, 5_000, 9_999):
        content = bytearray(10_000)
        if changed is not None:
            content[changed] = 1
        file.write_bytes(content)
        seen.add(digests.digest([file]))
    file.write_bytes(bytes(10_001))
    seen.add(digests.digest([file]))
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel"),
        ("model_type", "mistral", "LlamaForCausalLM has the model_type 'llama', not 'mistral'"),
        ("model_type", "granite", "not 'granite'"),
        ("hidden_act", "relu", "hidden_act 'relu'"),
        ("per_layer_config", {"0": {}}, "per_layer_config {'0': {}} is not supported"),
        ("quantization_config", {"quant_method": "aqlm"}, "'aqlm'"),
        ("rope_parameters", {"rope_type": "linear"}, "no 'factor'"),
        ("rope_parameters", [1], "rope_parameters is not an object"),
        ("hidden_size", "96", "'hidden_size' is '96', not an integer"),
        ("hidden_size", True, "'hidden_size' is True"),
        ("vocab_size", None, "the config requires (32000, 96)"),
        ("vocab_size", -1, "not within"),
        ("num_hidden_layers", 1 << 40, "1 to 4096 are supported"),
        ("num_attention_heads", 0, "has 0 heads"),
        ("num_key_value_heads", 4, "cannot share"),
        ("num_hidden_layers", 2, "unexpected tensors"),
        ("num_hidden_layers", 4, "tensor 'model.layers.3.input_layernorm.weight' is missing"),
        ("intermediate_size", 128, "gate_proj.weight has shape"),
        ("attention_bias", True, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ("rms_norm_eps", "NaN", "not a finite number"),
        ("rms_norm_eps", 1e308, "not a finite number of float32"),
        ("rms_norm_eps", 10**4000, "not a finite number of float32"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_the_name_of_its_field(
    directory: Path, field: str, value: Any, message: str
) -> None:
    change(directory / "config.json", **{field: value})
    assert message in refusal(directory)


def test_a_refusal_names_the_damaged_or_missing_file(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in refusal(directory)
    (directory / "generation_config.json").write_text("[]")
    assert "generation_config.json is not a JSON object" in refusal(directory)
    weights = directory / "model.safetensors"
    (directory / "generation_config.json").unlink()
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is damaged or truncated" in refusal(directory)
    (directory / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(directory)
    (directory / "config.json").unlink()
    assert "config.json" in refusal(directory)
    assert "does not exist" in refusal(directory / "nothing")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_header_raises_nothing_but_unusable_model(
    directory: Path, original: Path, data: st.DataObject
) -> None:
    content = bytearray((original / "model.safetensors").read_bytes())
    at = data.draw(st.integers(0, 7 + int.from_bytes(content[:8], "little")))
    damaged = data.draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"1", b"-9", b"e9"]))
    content[at : at + len(damaged)] = damaged
    (directory / "model.safetensors").write_bytes(content)
    with suppress(UnusableModel):
        read_header(directory)


def test_pickle_files_are_never_opened(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pickle" in refusal(directory)
    assert "pickle" in refusal(directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside.safetensors", "'../outside.safetensors'"),
        ("/etc/passwd", "'/etc/passwd'"),
        ("weights.bin", "'weights.bin'"),
        ("a.safetensors", "a.safetensors is missing"),
    ],
)
def test_an_index_may_name_only_existing_files_of_its_directory(
    directory: Path, name: str, words: str
) -> None:
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    change(directory / "model.safetensors.index.json", weight_map={"x": name})
    assert words in refusal(directory)


def test_an_end_token_must_be_in_the_vocabulary(directory: Path) -> None:
    change(directory / "generation_config.json", eos_token_id=VOCAB)
    assert f"eos_token_id {VOCAB} is outside" in refusal(directory)
    change(directory / "generation_config.json", eos_token_id="0")
    assert "neither a token id nor a list" in refusal(directory)


def test_the_card_has_the_unchanged_tokenizer_file(directory: Path) -> None:
    assert load(directory).card.tokenizer == tiny_tokenizer().to_str(pretty=True).encode()


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("tokenizer.json", {"added_tokens": 7}, "'added_tokens' is not a list"),
        ("tokenizer.json", {"model": {"vocab": {"a": "1"}}}, "is not an integer"),
        ("config.json", {"hidden_act": "x" * 10_000}, "xx is not supported; supported: gelu"),
        ("config.json", {"bos_token": "\ud800"}, "surrogates not allowed"),
        (
            "config.json",
            {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_scaling": 3},
            "'rope_scaling' is 3, not an object",
        ),
        (
            "config.json",
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "mlp_only_layers": 3,
            },
            "'mlp_only_layers' is 3, not a list",
        ),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_in_one_short_line(
    directory: Path, file: str, fields: dict[str, Any], reason: str
) -> None:
    change(directory / file, **fields)
    line = refusal(directory)
    assert reason in line
    assert len(line) < 1_000


def test_a_chat_template_that_is_not_utf8_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja" in refusal(directory)


def test_a_header_with_bytes_that_are_not_utf8_is_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dty\xed\xa0\x80"', 1))
    assert "not valid JSON" in refusal(directory)


def replace_in_header(file: Path, before: bytes, after: bytes) -> None:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(before, after, 1)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(SafetensorError):
        safe_open(file, framework="pt")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"dtype"', b'"dtype": "F64", "dtype"', "the key 'dtype' is there twice"),
        (b'"dtype"', b'"x": NaN, "dtype"', "NaN is not a JSON number"),
        (b'"format":"pt"', b'"format":1', "__metadata__ is not an object of strings"),
    ],
)
def test_a_header_that_the_safetensors_library_refuses_is_refused_before_a_start(
    directory: Path, before: bytes, after: bytes, message: str
) -> None:
    replace_in_header(directory / "model.safetensors", before, after)
    assert message in refusal(directory)


def test_weights_that_disappear_before_they_are_read_are_refused_in_one_line(
    directory: Path,
) -> None:
    header = read_header(directory)
    assert isinstance(header, ModelHeader)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnusableModel, match=r"model\.safetensors is damaged or truncated"):
        open_weights(header)
