"""The model card: the description of a model that an engine sends to its clients.

Only the worker opens the files of a model. It fills in the card, and the engine sends the card in
Welcome. So a gateway needs no model files, imports neither torch nor transformers, and can run on
another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from protocol.engine.attachments import ImageSupport
from protocol.engine.encoding import EncodingCard
from protocol.engine.sampling import SamplingParams
from protocol.wire.field_errors import field_error

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
"""The parameters that make the tokens so far less likely."""


def sets_penalty(fields: object) -> bool:
    """Return whether `fields`, which has PENALTIES, sets one of them, even to no effect."""
    return any(getattr(fields, name) is not None for name in PENALTIES)


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters for requests that do not set them; None leaves a parameter unset.

    The card contains the model's own defaults, from generation_config.json or the metadata of a
    GGUF file, and those of the catalogue. The options of a gateway may override them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    #: `bad_words` of SamplingParams. A request's own bad words are added to these.
    bad_words_ids: list[list[int]] | None = None

    def with_fallback(self, fallback: SamplingDefaults) -> SamplingDefaults:
        """Return these defaults, with the values of `fallback` for parameters that are unset."""
        return SamplingDefaults(**(fallback.set_values() | self.set_values()))

    def without_penalties(self) -> SamplingDefaults:
        """Return the same defaults without those for the tokens so far."""
        return msgspec.structs.replace(self, **dict.fromkeys(PENALTIES))

    def effective_values(self) -> dict[str, Any]:
        """Return, for each parameter, the value that applies to a request without sampling
        parameters."""
        neutral = {name: getattr(_NEUTRAL, _param(name)) for name in self.__struct_fields__}
        return neutral | self.set_values()

    def checked(self) -> tuple[SamplingDefaults, dict[str, Any]]:
        """Return the defaults that a request could set, and name -> value of the other ones."""
        values = self.set_values()
        invalid = {name: each for name, each in values.items() if _problem(name, each) is not None}
        valid = {name: each for name, each in values.items() if name not in invalid}
        return SamplingDefaults(**valid), invalid

    def set_values(self) -> dict[str, Any]:
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


_NEUTRAL = SamplingParams()


def _param(name: str) -> str:
    """Return the field of SamplingParams that has the default `name`."""
    return "bad_words" if name == "bad_words_ids" else name


def _problem(name: str, value: Any) -> str | None:
    """Return why no request could have this value, after its name; None if one could."""
    fields = {_param(name): value}
    try:
        msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        found = field_error(error, fields, SamplingParams)
        return f"{name}{found.path.removeprefix(_param(name))}: {found.problem}"
    return None


def sampling_defaults(text: str) -> SamplingDefaults:
    """Return the defaults in `text`, which is a JSON object of sampling parameters, or "". Raises
    ValueError with a message that names the bad parameter."""
    if not text:
        return SamplingDefaults()
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    known = SamplingDefaults.__struct_fields__
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{unknown[0]!r} has no default here; known: {', '.join(known)}")
    for name, value in values.items():
        if value is not None and (problem := _problem(name, value)) is not None:
            raise ValueError(problem)
    return msgspec.convert(values, SamplingDefaults, str_keys=True)


class InfillTokens(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Ids of the tokens that mark the parts of a fill-in-the-middle prompt, as the metadata of a
    GGUF file name them; None: not named. Most models need none of these, because a gateway finds
    the tokens by their text."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    #: Ends an answer, as the padding of training examples did.
    pad: int | None = None
    #: Stands before the name of a repository.
    repository: int | None = None
    #: Stands before each file of a repository.
    file: int | None = None


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about the model that a process without the model's files needs."""

    #: The model's own name, or else the stem of its path. The default name in the API.
    name: str
    #: The model family, as Hugging Face spells it: "LlamaForCausalLM".
    architecture: str
    #: Hex digest, equal for equal weights and tokenizer. Part of every hash in the prefix cache.
    digest: str
    vocab_size: int
    #: The context length that the model was made for. A server may allow less (Limits.max_len).
    context_tokens: int
    #: Content of tokenizer.json, in the format of Hugging Face `tokenizers`.
    tokenizer: bytes
    #: The model's end tokens. Each of them ends an answer.
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    #: Name in chat templates -> text of the token: {"bos_token": "<s>", "eos_token": ...}.
    special_tokens: dict[str, str] = {}
    #: Jinja source of the chat template; None if the model has none.
    chat_template: str | None = None
    #: JSON in which the checkpoint describes the format of its answers; None if it does not.
    response_template: str | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    #: The catalogue's values for parameters that `defaults` do not set. Penalties among them are
    #: not for every request (`gateway.served_model.RequestDefaults`).
    recommended: SamplingDefaults = SamplingDefaults()
    #: dtype of the weights in memory: "bfloat16" or "float32".
    dtype: str = "float32"
    #: Format of the files: "gguf" or "safetensors"; "" if it is not known.
    file_format: str = ""
    #: Number type of most of the quantised weights in the files, such as "Q4_1"; "" if there are
    #: none.
    quantization: str = ""
    num_parameters: int = 0
    weights_bytes: int = 0
    license: str | None = None
    #: Jinja source of the template for conversations with tools, if the model has a separate one.
    tool_use_template: str | None = None
    #: Digest of everything except the model that determines the exact bits of the logits: kernels,
    #: C library and dtype. Two engines with equal `digest` and `numerics` give the same answers.
    #: Empty: the bits of a position's logits also depend on how the engine computes the position.
    numerics: str = ""
    infill_tokens: InfillTokens = InfillTokens()
    #: Whether the model generates text.
    generates: bool = True
    #: What the model encodes; None: nothing.
    encoding: EncodingCard | None = None
    #: The images that the model reads; None: it reads none.
    images: ImageSupport | None = None


class CardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a card file. A worker process writes it for a gateway without an engine."""

    card: ModelCard
    #: Most tokens of prompt and answer together.
    max_len: int


def write_card(path: str | Path, content: CardFile) -> None:
    Path(path).write_bytes(msgspec.msgpack.encode(content))


def read_card(path: str | Path) -> CardFile:
    """Return the content of a card file. Raises ValueError if it is missing or malformed."""
    try:
        return msgspec.msgpack.decode(Path(path).read_bytes(), type=CardFile)
    except OSError as error:
        raise ValueError(f"cannot read the card {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a model card: {error}") from None
