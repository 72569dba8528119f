"""Models with the files of sentence-transformers 5.4 and later: the tokenizer's settings have the
most tokens of an input, and the function of a score is not in config.json. Below, at and above the
limit, vectors and scores equal those of transformers for the truncated texts, as those of
sentence-transformers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from gateway.text.inputs import InputText, InputTokenizer, TokenizedInput, Truncation
from protocol.engine.encoding import Pooling
from tests.support.encoder_models import (
    VARIANTS,
    encode_inputs,
    random_encoder,
    write_encoder,
    write_modules,
    write_newer_modules,
)
from worker.encoders.header import EncoderHeader
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.errors import UnusableModel
from worker.loading.encoder import load_encoder
from worker.loading.header import encoder_header

LIMIT = 20
TEXTS = [
    " ".join(f"w{(7 * n + length) % 40}" for n in range(length)) for length in (3, 17, 18, 19, 200)
]
"""With the two special tokens, the third has as many tokens as the limit."""
PAIRS = [(TEXTS[0], text) for text in TEXTS]
TOLERANCE = 1e-4


def header_of(path: Path) -> EncoderHeader:
    header = encoder_header(path)
    assert header is not None
    return header


def limit_of(path: Path) -> int:
    return header_of(path).encoding.max_tokens


def computed(path: Path, texts: list[InputText]) -> Tensor:
    """Return the vectors or scores of texts that are truncated to the model's limit."""
    header = header_of(path)
    limit = header.encoding.max_tokens
    tokenizer = InputTokenizer(Tokenizer.from_buffer(header.tokenizer), limit, 1 << 16)
    found: list[TokenizedInput] = tokenizer.encode(
        texts,
        ["text"] * len(texts),
        truncation=Truncation(limit),
        offload=lambda work: work(),
    )
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
    inputs = encode_inputs([each.ids for each in found], [each.split for each in found])
    with torch.inference_mode():
        return runner.encode(inputs)


def truncated(path: Path, text: InputText) -> dict[str, Any]:
    """Return the model's input, as sentence-transformers tokenizes: with the tokenizer's limit."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    assert tokenizer.model_max_length == LIMIT
    pair = text if isinstance(text, tuple) else (text,)
    values: dict[str, Any] = tokenizer(*pair, truncation="longest_first", return_tensors="pt")
    return values


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors_are_those_of_texts_cut_to_the_tokenizers_limit(
    kind: str, pooling: Pooling, tmp_path: Path
) -> None:
    model = random_encoder(kind, **VARIANTS[kind]["plain"])
    write_newer_modules(write_encoder(tmp_path, model), pooling, LIMIT)
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(input_ids=truncated(tmp_path, text)["input_ids"]).last_hidden_state[0]
        vector = hidden[0] if pooling == "cls" else hidden.mean(0)
        wanted.append(torch.nn.functional.normalize(vector, dim=-1))
    assert limit_of(tmp_path) == LIMIT
    found = computed(tmp_path, list(TEXTS))
    assert float((found - torch.stack(wanted)).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("activation", "is_sigmoid"),
    [
        ("torch.nn.modules.linear.Identity", False),
        ("torch.nn.modules.activation.Sigmoid", True),
        (None, True),
    ],
)
def test_scores_have_the_function_of_the_settings(
    activation: str | None, is_sigmoid: bool, tmp_path: Path
) -> None:
    opposite = {True: "torch.nn.modules.linear.Identity", False: None}[is_sigmoid]
    older = {"sentence_transformers": {"activation_fn": opposite}} if activation else {}
    model = random_encoder("bert", scores=True, num_labels=1, **older)
    write_newer_modules(write_encoder(tmp_path, model), None, LIMIT, activation=activation)
    wanted = []
    for pair in PAIRS:
        with torch.no_grad():
            logits = model(**truncated(tmp_path, pair)).logits[0]
        wanted.append(logits.sigmoid() if is_sigmoid else logits)
    assert limit_of(tmp_path) == LIMIT
    found = computed(tmp_path, list(PAIRS))
    assert float((found - torch.stack(wanted)).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "has_types"),
    [
        ({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}, True),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"model_input_names": None, "tokenizer_class": "TokenizersBackend"}, False),
        ({"model_input_names": None, "tokenizer_class": "BertTokenizer"}, True),
    ],
    ids=str,
)
def test_the_tokenizer_decides_whether_the_second_text_has_a_type_of_its_own(
    settings: dict[str, Any], has_types: bool, tmp_path: Path
) -> None:
    model = random_encoder("bert", scores=True, num_labels=1)
    write_newer_modules(write_encoder(tmp_path, model), None, LIMIT)
    wanted = []
    for pair in PAIRS:
        values = truncated(tmp_path, pair)
        if not has_types:
            del values["token_type_ids"]
        with torch.no_grad():
            wanted.append(model(**values).logits[0].sigmoid())
    file = tmp_path / "tokenizer_config.json"
    changed = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: each for key, each in changed.items() if each is not None}))
    if settings.get("tokenizer_class") != "BertTokenizer":  # it would need another vocabulary
        assert ("token_type_ids" in AutoTokenizer.from_pretrained(tmp_path)("a", "b")) == has_types
    found = computed(tmp_path, list(PAIRS))
    assert float((found - torch.stack(wanted)).abs().max()) < TOLERANCE


LIMITS: dict[str, tuple[str, dict[str, Any], int]] = {
    "the tokenizer's": ("tokenizer_config.json", {"model_max_length": 30}, 30),
    "a placeholder": ("tokenizer_config.json", {"model_max_length": int(1e30)}, 320),
    "an older key wins": ("sentence_bert_config.json", {"max_seq_length": 40}, 40),
    "an older name of the file": ("sentence_xlm-roberta_config.json", {"max_seq_length": 41}, 41),
    "an option of the tokenizer": (
        "sentence_bert_config.json",
        {"max_seq_length": 40, "processor_kwargs": {"model_max_length": 25}},
        25,
    ),
    "the same by its older name": (
        "sentence_bert_config.json",
        {"tokenizer_args": {"model_max_length": 26}},
        26,
    ),
    "an option of each call": (
        "sentence_bert_config.json",
        {"processing_kwargs": {"text": {"max_length": 12}}, "max_seq_length": 40},
        12,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_where_sentence_transformers_reads_it(name: str, tmp_path: Path) -> None:
    file, fields, limit = LIMITS[name]
    write_modules(write_encoder(tmp_path, random_encoder("bert")), "mean")
    (tmp_path / file).write_text(json.dumps(fields))
    assert limit_of(tmp_path) == limit


REFUSED: dict[str, dict[str, Any]] = {
    "query_length": {"query_length": 32},
    "query_expansion": {"query_expansion": {"strategy": "fixed"}},
    "modality_config": {"modality_config": {"image": {"method": "forward"}}},
    "processing_kwargs": {"processing_kwargs": ["text"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_description_of_the_transformer_that_is_not_supported_is_refused(
    name: str, tmp_path: Path
) -> None:
    write_newer_modules(write_encoder(tmp_path, random_encoder("bert")), "mean", LIMIT)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(REFUSED[name]))
    with pytest.raises(UnusableModel, match=name):
        header_of(tmp_path)


def test_a_dense_module_that_makes_a_score_is_refused(tmp_path: Path) -> None:
    write_modules(write_encoder(tmp_path, random_encoder("bert")), "mean", dense=True)
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"module_output_name": "scores"}))
    with pytest.raises(UnusableModel, match="module_output_name 'scores' is not supported"):
        header_of(tmp_path)
