"""Small tokenizers of XLM-RoBERTa: SentencePiece's own model, transformers' conversion of it, and
the metadata that llama.cpp's converter writes for it."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from tests.support.tokenizers import DATA, OTHER_SCRIPTS
from worker.checkpoint.gguf_tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
"""Tokens of XLM-RoBERTa with the ids 0 to 3, which SentencePiece orders otherwise."""


@cache
def sentencepiece_model(**options: Any) -> bytes:
    """Return the bytes of a sentencepiece.bpe.model that is learnt from our texts, with
    SentencePiece's usual rules for normalisation (nmt_nfkc)."""
    text, written = (DATA / "prose.txt").read_text(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text.splitlines() if line] + OTHER_SCRIPTS * 3),
        model_writer=written,
        model_type="unigram",
        vocab_size=900,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def xlmr_tokenizer(model: bytes) -> Tokenizer:
    """Return transformers' conversion of a model of SentencePiece."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sentencepiece.bpe.model").write_bytes(model)
        found: Tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(
            directory
        ).backend_tokenizer
    return found


def unigram_metadata(model: bytes, num_padding: int = 0) -> dict[str, Any]:
    """Return the metadata of a model of SentencePiece, without "tokenizer.ggml." in their keys.

    num_padding   rows of the embedding behind that of the mask token
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    kept = proto.pieces[3:]
    mask = len(proto.pieces) + 1
    unused = [f"[PAD{mask + place - 1}]" for place in range(num_padding + 1)]
    return {
        "model": "t5",
        "pre": "default",
        "tokens": [*SPECIAL, *(each.piece for each in kept), *unused],
        "scores": [0.0] * 4 + [each.score for each in kept] + [-10000.0] * len(unused),
        "token_type": [
            *(CONTROL, CONTROL, CONTROL, UNKNOWN),
            *(BYTE if each.type == BYTE else NORMAL for each in kept),
            *[UNUSED] * len(unused),
        ],
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "seperator_token_id": 2,
        "padding_token_id": 1,
        "cls_token_id": 0,
        "mask_token_id": mask,
        "add_bos_token": True,
        "add_eos_token": True,
    }


def sentencepiece_ids(model: bytes, texts: Iterable[str]) -> list[list[int]]:
    """Return SentencePiece's own ids of texts, with the numbers that XLM-RoBERTa gives them."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [[each + 1 if each else 3 for each in processor.encode(text)] for text in texts]
