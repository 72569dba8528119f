"""Tiny random rerankers in every form in which Qwen3-Reranker is published, and their scores as
transformers computes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.support.family_models import random_model

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
CONTEXT = 2048
"""Most tokens of a pair. The prompt alone has hundreds of the tokenizer's short tokens."""


def reranker_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and a few merges, among them "yes" and "no"."""
    pieces = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    return tokenizer


TOKENIZER = reranker_tokenizer()
YES, NO = (TOKENIZER.get_vocab()[token] for token in ("yes", "no"))


def add_tokenizer(writer: GGUFWriter) -> None:
    """Add the tokenizer to a GGUF file."""
    vocab = sorted(TOKENIZER.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([piece for piece, _ in vocab])
    writer.add_token_types([3 if piece in MARKS else 1 for piece, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(0)


def random_reranker(**changes: Any) -> transformers.PreTrainedModel:
    settings = {"max_position_embeddings": CONTEXT, "initializer_range": 0.15}
    model: transformers.PreTrainedModel = random_model("qwen3", **(settings | changes))
    return model


def write_reranker(path: Path, model: transformers.PreTrainedModel) -> Path:
    """Write a model as the directories of Qwen3-Reranker are. Return `path`."""
    path.mkdir(exist_ok=True)
    model.save_pretrained(path)
    TOKENIZER.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return path


def write_logit_score(path: Path, true: int = YES, false: int | None = NO) -> Path:
    """Add the files with which sentence-transformers compares two logits. Return `path`."""
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "x.LogitScore"}
    modules = [
        {"path": place, "type": f"sentence_transformers.{kind}"} for place, kind in kinds.items()
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir(exist_ok=True)
    config = {"true_token_id": true, "false_token_id": false}
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return path


def classifier_of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return the model of class Qwen3ForSequenceClassification with the same scores."""
    config = type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
    found: transformers.PreTrainedModel = (
        transformers.AutoModelForSequenceClassification.from_config(config).eval()
    )
    found.base_model.load_state_dict(model.base_model.state_dict())
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        found.score.weight.copy_(head[YES : YES + 1] - head[NO : NO + 1])
    return found


def prompt_ids(
    query: str, document: str, instruction: str = INSTRUCTION, limit: int | None = None
) -> list[int]:
    """Return the tokens of a pair, as the model card makes them: the part between prefix and suffix
    is tokenized alone, and truncated if there is a limit."""
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    prefix, middle, suffix = (TOKENIZER.encode(text).ids for text in (PREFIX, body, SUFFIX))
    if limit is not None:
        middle = middle[: limit - len(prefix) - len(suffix)]
    return [*prefix, *middle, *suffix]


@torch.no_grad()
def probabilities(model: transformers.PreTrainedModel, inputs: Sequence[Sequence[int]]) -> Tensor:
    """Return the probability [N, 1] of "yes" against "no" after each input, as the model card
    computes it."""
    logits = torch.stack([model(torch.tensor([list(ids)])).logits[0, -1] for ids in inputs])
    return logits[:, [NO, YES]].log_softmax(-1)[:, 1:].exp()
