"""Tiny random encoders of every family, with options of their configs toggled, and their vectors as
transformers computes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from protocol.engine.encoding import EncodeInputs, Pooling
from protocol.wire.arrays import Int32

VOCAB = 61
WORDS = 40
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 320,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
"""No two of these sizes are equal, so most transposed or misplaced tensors have the wrong shape."""
MODERN = {
    "local_attention": 12,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "initializer_cutoff_factor": 10.0,
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {
        "plain": {},
        "tanh gelu": {"hidden_act": "gelu_new"},
        "one type": {"type_vocab_size": 1},
    },
    "roberta": {"plain": {"type_vocab_size": 1}, "late padding": {"pad_token_id": 5}},
    "xlm-roberta": {"plain": {"type_vocab_size": 1}},
    "mpnet": {"plain": {}, "a long table": {"max_position_embeddings": 1032}},
    "nomic_bert": {
        "plain": {},
        "one type": {"type_vocab_size": 1},
        "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "scaled after training": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
        },
    },
    "modernbert": {
        "plain": MODERN,
        "biases": MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
        "all global": MODERN | {"layer_types": ["full_attention"] * 4},
        "bases": MODERN
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    },
}
"""`model_type` -> name of the variant -> fields of its config."""
SCORERS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {
        "one label": {"num_labels": 1},
        "no sigmoid": {
            "num_labels": 1,
            "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        },
        "no sigmoid, by an older key": {
            "num_labels": 1,
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        },
    },
    "roberta": {"one label": {"num_labels": 1, "type_vocab_size": 1}},
    "xlm-roberta": {"one label": {"num_labels": 1, "type_vocab_size": 1}},
    "mpnet": {"one label": {"num_labels": 1}},
    "nomic_bert": {"one label": {"num_labels": 1}},
    "modernbert": {
        "one label": MODERN | {"num_labels": 1},
        "mean": MODERN | {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    },
}
"""The same for models with a head that scores."""
MODULES = "sentence_transformers.models."


def random_encoder(
    model_type: str, *, scores: bool = False, **changes: Any
) -> transformers.PreTrainedModel:
    """Return an encoder with random weights, among them those of norms and biases."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    model: transformers.PreTrainedModel = kind.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "embedding" in name:
                parameter.normal_(0, 0.5)
            elif "relative_attention_bias" in name:
                parameter.normal_(0, 2.0)
    return model


def tiny_word_tokenizer() -> Tokenizer:
    """Return a tokenizer of words, which puts [CLS] and [SEP] around a text or a pair."""
    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def write_encoder(path: Path, model: transformers.PreTrainedModel) -> Path:
    """Write a model and the tiny tokenizer as transformers does. Return `path`."""
    model.save_pretrained(path)
    tiny_word_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_modules(
    path: Path,
    pooling: Pooling,
    *,
    hidden: int = SIZES["hidden_size"],
    normalizes: bool = True,
    dense: bool = False,
    settings: dict[str, Any] | None = None,
    max_tokens: int | None = None,
) -> Path:
    """Add the files of sentence-transformers to a model's directory, as its versions 2 to 4 write
    them. Return `path`."""
    from safetensors.torch import save_file

    kinds = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalizes]
    modules = [
        {
            "idx": place,
            "name": str(place),
            "path": "" if place == 0 else f"{place}_{kind}",
            "type": MODULES + kind,
        }
        for place, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    config = {
        "word_embedding_dimension": hidden,
        **{f"pooling_mode_{mode}": name == pooling for name, mode in modes.items()},
        "pooling_mode_max_tokens": False,
    }
    for place, kind in enumerate(kinds):
        (path / f"{place}_{kind}").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense:
        generator = torch.Generator().manual_seed(3)
        tensors = {
            "linear.weight": torch.randn(20, hidden, generator=generator) * 0.2,
            "linear.bias": torch.randn(20, generator=generator) * 0.2,
        }
        save_file(tensors, path / "2_Dense" / "model.safetensors")
        about = {
            "in_features": hidden,
            "out_features": 20,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (path / "2_Dense" / "config.json").write_text(json.dumps(about))
    if max_tokens is not None:
        lengths = {"max_seq_length": max_tokens, "do_lower_case": False}
        (path / "sentence_bert_config.json").write_text(json.dumps(lengths))
    if settings is not None:
        (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return path


def write_newer_modules(
    path: Path, pooling: Pooling | None, max_tokens: int, *, activation: str | None = None
) -> Path:
    """Add the files of sentence-transformers to a model's directory, as its version 6.2 writes them
    (since 5.4). Return `path`.

    pooling      None: a cross-encoder, whose scores are computed by the function `activation`
    max_tokens   most tokens of an input; stored among the settings of the tokenizer
    """
    base = "sentence_transformers.base.modules"
    kinds = {"": f"{base}.transformer.Transformer"}
    if pooling is not None:
        kinds["1_Pooling"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        kinds["2_Normalize"] = f"{base}.normalize.Normalize"
        places = {f"module_{end}put_name": "sentence_embedding" for end in ("in", "out")}
        configs: dict[str, dict[str, Any]] = {
            "1_Pooling": {
                "embedding_dimension": SIZES["hidden_size"],
                "pooling_mode": pooling,
                "include_prompt": True,
            },
            "2_Normalize": places,
        }
        for place, config in configs.items():
            (path / place).mkdir(exist_ok=True)
            (path / place / "config.json").write_text(json.dumps(config))
    modules = [
        {"idx": place, "name": str(place), "path": folder, "type": kind}
        for place, (folder, kind) in enumerate(kinds.items())
    ]
    output = "last_hidden_state" if pooling else "logits"
    transformer = {
        "transformer_task": "feature-extraction" if pooling else "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": "token_embeddings" if pooling else "scores",
    }
    settings: dict[str, Any] = {"default_prompt_name": None, "prompts": {}}
    if pooling is None:
        settings |= {"model_type": "CrossEncoder", "activation_fn": activation}
    else:
        settings |= {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"model_max_length": max_tokens}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": transformer,
        "config_sentence_transformers.json": settings,
        "tokenizer_config.json": tokenizer,
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def encode_inputs(
    inputs: Sequence[Sequence[int]], splits: Sequence[int] | None = None
) -> EncodeInputs:
    return EncodeInputs(
        tokens=Int32.of(token for each in inputs for token in each),
        lengths=Int32.of(map(len, inputs)),
        splits=None if splits is None else Int32.of(splits),
    )


def some_inputs(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Return random inputs without padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def hidden_states(
    model: transformers.PreTrainedModel, ids: Sequence[int], split: int | None = None
) -> Tensor:
    """Return the last hidden states [T, hidden] of one input."""
    types = None
    if split is not None:
        types = torch.tensor([[0] * split + [1] * (len(ids) - split)])
    found = (
        model(torch.tensor([list(ids)]), token_type_ids=types)
        if types is not None
        else model(torch.tensor([list(ids)]))
    )
    return found.last_hidden_state[0]


def pooled(hidden: Tensor, pooling: Pooling, *, normalizes: bool = True) -> Tensor:
    """Return the vector of one input, from its hidden states."""
    vector = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]
    return torch.nn.functional.normalize(vector, dim=-1) if normalizes else vector
