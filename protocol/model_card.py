"""What the engine tells every client about the model it serves.

The worker alone opens model files and fills the card; the engine hands it on at the handshake. So a
gateway needs no model files, imports neither torch nor transformers, and can run on another
machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.sampling import SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters for requests that do not set them; None leaves a parameter open.

    The card's are the model's own: of its generation_config or GGUF metadata, or recommended for it
    by the catalogue. A gateway may override them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def over(self, weaker: SamplingDefaults) -> SamplingDefaults:
        """Return these defaults, with those of `weaker` for the parameters left open here."""
        return SamplingDefaults(**(weaker._said() | self._said()))

    def in_effect(self) -> dict[str, float]:
        """Return the value of each parameter in a request that sets none of them."""
        said = self._said()
        return {name: said.get(name, getattr(_NEUTRAL, name)) for name in self.__struct_fields__}

    def _said(self) -> dict[str, Any]:
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


_NEUTRAL = SamplingParams()


def sampling_defaults(text: str) -> SamplingDefaults:
    """Parse a JSON object of sampling defaults; "" is an empty one. Raise ValueError, naming the
    member that is unknown or out of bounds."""
    if not text:
        return SamplingDefaults()
    try:
        values = msgspec.json.decode(text, type=dict[str, int | float | None])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a JSON object of numbers: {error}") from None
    known = SamplingDefaults.__struct_fields__
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{unknown[0]!r} has no default here; known: {', '.join(known)}")
    for name, value in values.items():
        try:
            msgspec.convert({} if value is None else {name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {str(error).partition(' - at')[0]}") from None
    return msgspec.convert(values, SamplingDefaults)


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a model that a process without its files must know.

    name               what the model calls itself, or the stem of its path: the default served name
    architecture       the model family, as Hugging Face spells it: "LlamaForCausalLM"
    digest             hex; equal for equal weights and tokenizer, part of every prefix-cache hash
    context_tokens     what the model was made for; a server may allow less (Limits.max_len)
    tokenizer          tokenizer.json of Hugging Face `tokenizers`, as bytes
    chat_template      Jinja source, or None where the model has none
    tool_use_template  the one for conversations with tools, if the model has another for them
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
    tool_use_template: str | None = None
