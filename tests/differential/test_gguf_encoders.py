"""GGUF files of encoders, and of decoders that give vectors, against transformers and against the
tokenizer from which they were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

from protocol.engine.encoding import Pooling
from tests.support.encoder_models import (
    VOCAB,
    encode_inputs,
    hidden_states,
    pooled,
    random_encoder,
    some_inputs,
)
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.gguf_tokenizers import assert_same
from tests.support.unigram import sentencepiece_model, unigram_metadata, xlmr_tokenizer
from worker.encoders.header import EncoderHeader
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.errors import UnusableModel
from worker.loading.encoder import load_encoder
from worker.loading.header import ModelHeader, read_any_header
from worker.startup.check_config import check_config

SPACE = "\u2581"
POOLING_TYPES: dict[Pooling, int] = {"mean": 1, "cls": 2, "last": 3}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "sea", "har", "##bour", "##s", "a", "[", "é"]
TEXTS = ["The sea", "harbours", "harbour seas the", "a [ a", "unknown", "É é", ""]


GGUF_ARCHS = {"nomic_bert": MODEL_ARCH.NOMIC_BERT}
"""model_type -> architecture of the GGUF file, if that is not "bert"."""


def wordpiece(words: list[str], *, lowercase: bool = True) -> Tokenizer:
    """Return a tokenizer as those of BERT's checkpoints are."""
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def write_encoder_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    words: list[str] | None = None,
    tokenizer: dict[str, Any] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    skips_types: bool = False,
    **metadata: Any,
) -> Path:
    """Write a BERT, an XLM-RoBERTa or Nomic's BERT as llama.cpp's converter does.

    words         the vocabulary of a BERT
    tokenizer     the metadata of the tokenizer of an XLM-RoBERTa
    skips_types   write no table of token types
    """
    config = model.config
    arch = GGUF_ARCHS.get(config.model_type, MODEL_ARCH.BERT)
    # XLM-RoBERTa's first position has the row after that of the padding token's id. The converter
    # leaves out the rows before it.
    first = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - first)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_token_type_count(config.type_vocab_size)
    if tokenizer is None:
        _add_wordpiece(
            writer, words or WORDS + [f"w{place}" for place in range(VOCAB - len(WORDS))]
        )
    else:
        _add_unigram(writer, tokenizer)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"{MODEL_ARCH_NAMES[arch]}.{key}", value)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = model.state_dict()
    if arch == MODEL_ARCH.NOMIC_BERT:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        tensors = load_file(saved(model, path.parent))
    for theirs, tensor in tensors.items():
        if theirs.startswith("pooler") or theirs.endswith(("position_ids", "token_type_ids")):
            continue
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if skips_types and name == "token_types.weight":
            continue
        own = kind if tensor.ndim > 1 and "embd" not in name and "types" not in name else None
        data = tensor.numpy()[first if name == "position_embd.weight" else 0 :]
        if own is not None:
            writer.add_tensor(name, quants.quantize(data, own), raw_dtype=own)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model, which gives tensors their published names. Return the file."""
    model.save_pretrained(folder / "saved")
    return folder / "saved" / "model.safetensors"


def _add_wordpiece(writer: GGUFWriter, words: list[str]) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_stored(word) for word in words])
    writer.add_token_types([3 if place < 4 else 1 for place in range(len(words))])
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)


def _add_unigram(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _ if key == "precompiled_charsmap":
                writer.add_precompiled_charsmap(bytes(value))
            case _:
                writer.add_array(name, value)


def _stored(word: str) -> str:
    if word.startswith("[") and word.endswith("]") and len(word) > 1:
        return word
    return word[2:] if word.startswith("##") else SPACE + word


def header_of(path: Path) -> EncoderHeader:
    header = read_any_header(path)
    assert isinstance(header, EncoderHeader)
    return header


@pytest.mark.parametrize("pooling", POOLING_TYPES)
def test_vectors_of_a_gguf_equal_those_of_transformers(pooling: Pooling, tmp_path: Path) -> None:
    model = random_encoder("bert")
    path = write_encoder_gguf(tmp_path / "b.gguf", model, pooling_type=POOLING_TYPES[pooling])
    header = header_of(path)
    assert header.encoding.pooling == pooling
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    inputs = some_inputs([5, 1, 130, 9])
    with torch.inference_mode():
        runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
        found = runner.encode(encode_inputs(inputs))
    wanted = torch.stack([pooled(hidden_states(model, ids), pooling) for ids in inputs])
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("theta", [1000.0, 50.0])
def test_vectors_of_nomics_bert_equal_those_of_transformers(theta: float, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    model = random_encoder("nomic_bert", rope_parameters=rope)
    header = header_of(write_encoder_gguf(tmp_path / "n.gguf", model, pooling_type=1))
    assert (header.spec.architecture, header.encoding.max_tokens) == ("NomicBertModel", 320)
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    inputs = some_inputs([5, 1, 130, 320])
    with torch.inference_mode():
        runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
        found = runner.encode(encode_inputs(inputs))
    wanted = torch.stack([pooled(hidden_states(model, ids), "mean") for ids in inputs])
    assert float((found - wanted).abs().max()) < 1e-4
    check_config(tmp_path / "n.gguf")


def random_xlmr(vocab_size: int, **changes: Any) -> PreTrainedModel:
    usual = {"type_vocab_size": 1, "pad_token_id": 1}
    return random_encoder("xlm-roberta", vocab_size=vocab_size, **(usual | changes))


@pytest.mark.parametrize("types", [0, 1, 2])
@pytest.mark.parametrize("pad", [1, 5])
def test_vectors_of_an_xlm_roberta_equal_those_of_transformers(
    pad: int, types: int, tmp_path: Path
) -> None:
    """A file may have no table of token types: then its one row is zero."""
    tokenizer = unigram_metadata(sentencepiece_model())
    model = random_xlmr(len(tokenizer["tokens"]), pad_token_id=pad, type_vocab_size=max(types, 1))
    if types == 0:
        torch.nn.init.zeros_(model.embeddings.token_type_embeddings.weight)
    path = write_encoder_gguf(
        tmp_path / "x.gguf", model, tokenizer=tokenizer, skips_types=types == 0, pooling_type=2
    )
    header = header_of(path)
    assert header.spec.architecture == "XLMRobertaModel"
    assert (header.spec.context_tokens, header.spec.token_types) == (320 - pad - 1, types)
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    ours = Tokenizer.from_buffer(header.text.tokenizer)
    inputs = [*some_inputs([5, 1, 130, 320 - pad - 1]), *(ours.encode(text).ids for text in TEXTS)]
    with torch.inference_mode():
        runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
        found = runner.encode(encode_inputs(inputs))
    wanted = torch.stack([pooled(hidden_states(model, ids), "cls") for ids in inputs])
    assert float((found - wanted).abs().max()) < 1e-4


def test_the_tokenizer_of_an_xlm_roberta_is_read_from_its_file(tmp_path: Path) -> None:
    tokenizer = unigram_metadata(sentencepiece_model())
    model = random_xlmr(len(tokenizer["tokens"]))
    path = write_encoder_gguf(tmp_path / "x.gguf", model, tokenizer=tokenizer)
    text = header_of(path).text
    ours, original = Tokenizer.from_buffer(text.tokenizer), xlmr_tokenizer(sentencepiece_model())
    assert_same(ours, original, [*TEXTS, "<s> sea </s> <mask>", "\ufb01ns \u3000 🙂"])
    assert (text.bos_token_id, text.pad_token_id) == (0, 1)
    assert text.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    check_config(path)


def test_quantised_weights_are_expanded(tmp_path: Path) -> None:
    model = random_encoder("bert", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    kind = GGMLQuantizationType.Q8_0
    header = header_of(write_encoder_gguf(tmp_path / "b.gguf", model, kind=kind))
    assert "Q8_0" in header.kinds.values()
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    inputs = some_inputs([30, 9])
    with torch.inference_mode():
        runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
        found = runner.encode(encode_inputs(inputs))
    wanted = torch.stack([pooled(hidden_states(model, ids), "mean") for ids in inputs])
    cosines = (found * wanted).sum(-1)
    assert float(cosines.min()) > 0.99


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_rebuilt_tokenizer_gives_the_same_tokens(lowercase: bool, tmp_path: Path) -> None:
    words = WORDS + ["Sea"] * (not lowercase)
    words += [f"w{place}" for place in range(VOCAB - len(words))]
    original = wordpiece(words, lowercase=lowercase)
    path = write_encoder_gguf(tmp_path / "b.gguf", random_encoder("bert"), words=words)
    rebuilt = Tokenizer.from_buffer(header_of(path).tokenizer)
    for text in TEXTS:
        one, other = original.encode(text, "the sea"), rebuilt.encode(text, "the sea")
        assert (one.ids, one.type_ids) == (other.ids, other.type_ids), text
        assert original.encode(text).ids == rebuilt.encode(text).ids, text


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"pooling_type": 4}, "models that score are not supported in GGUF files"),
        ({"pooling_type": 9}, "bert.pooling_type 9 is not supported"),
    ],
)
def test_a_file_that_is_not_supported_is_refused_by_key(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_encoder_gguf(tmp_path / "b.gguf", random_encoder("bert"), **metadata)
    with pytest.raises(UnusableModel, match=words):
        read_any_header(path)


def test_the_start_of_an_encoders_file_suffices_to_check_it(tmp_path: Path) -> None:
    path = write_encoder_gguf(tmp_path / "b.gguf", random_encoder("bert"))
    check_config(path)


def test_a_decoder_whose_file_names_a_pooling_only_encodes(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "q.gguf", random_model("qwen3"), metadata={"qwen3.pooling_type": 3}
    )
    header = read_any_header(path)
    assert isinstance(header, ModelHeader)
    assert not header.generates
    assert header.encoding is not None
    assert header.encoding.pooling == "last"


def test_a_decoder_without_pooling_generates(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "q.gguf", random_model("qwen3"), metadata={"qwen3.pooling_type": 0}
    )
    header = read_any_header(path)
    assert isinstance(header, ModelHeader)
    assert header.generates
    assert header.encoding is None


def test_the_tokenizer_of_a_real_vocabulary_is_rebuilt(tmp_path: Path) -> None:
    """Every token of a vocabulary is written and read, also those in brackets."""
    words = [*WORDS, "[unused1]", "]", "##]"]
    words += [f"w{place}" for place in range(VOCAB - len(words))]
    path = write_encoder_gguf(tmp_path / "b.gguf", random_encoder("bert"), words=words)
    rebuilt = json.loads(header_of(path).tokenizer)
    assert rebuilt["model"]["vocab"] == {word: i for i, word in enumerate(words)}
