"""What the engine tells every client about the model it serves.

The worker alone opens model files and fills the card; the engine hands it on at the handshake. So a
gateway needs no model files, imports neither torch nor transformers, and can run on another
machine.
"""

from __future__ import annotations

import msgspec


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """From the model's generation_config; None means that the model does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a model that a process without its files must know.

    name               what the model calls itself, or the stem of its path: the default served name
    architecture       the model family, as Hugging Face spells it: "LlamaForCausalLM"
    digest             hex; equal for equal weights and tokenizer, part of every prefix-cache hash
    context_tokens     what the model was made for; a server may allow less (Limits.max_len)
    tokenizer          tokenizer.json of Hugging Face `tokenizers`, as bytes
    chat_template      Jinja source, or None where the model has none
    response_template  JSON in which the checkpoint describes its own answers, or None
    special_tokens     the names templates use -> text: {"bos_token": "<s>", "eos_token": ...}
    eos_token_ids      any of them ends an answer
    dtype              of the weights in memory: "bfloat16" or "float32"
    """

    name: str
    architecture: str
    digest: str
    vocab_size: int
    context_tokens: int
    tokenizer: bytes
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    special_tokens: dict[str, str] = {}
    chat_template: str | None = None
    response_template: str | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    dtype: str = "float32"
    num_parameters: int = 0
    weights_bytes: int = 0
    license: str | None = None
