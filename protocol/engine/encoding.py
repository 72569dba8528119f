"""The inputs and the results of encoding: texts whose vectors, or pairs whose scores, are wanted.

An input is computed whole, in one step, and leaves nothing behind. So a request that encodes has no
slot and no K/V blocks.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from protocol.wire.arrays import Int32

MAX_INPUTS = 4096
"""Most inputs of one request."""
MAX_REQUEST_TOKENS = 1 << 22
"""Most tokens of one request."""
MAX_RESULT_NUMBERS = 1 << 23
"""Most numbers in the results of one request: 32 MiB."""

MAX_STEP_INPUTS = 512
"""Most inputs of one step."""

EncodeTask = Literal["embed", "score"]
"""embed: a vector for each text. score: a number for each pair of texts."""
Pooling = Literal["cls", "mean", "last"]
"""How the vectors of an input's tokens become one: the first, the mean of all, or the last."""
Similarity = Literal["cosine", "dot"]


class EncodeInputs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Inputs to encode. T tokens in N inputs. The constructor raises ValueError if the arrays
    contradict each other, or if there are more than MAX_INPUTS inputs."""

    #: [T] the token ids of all inputs.
    tokens: Int32
    #: [N] number of tokens of each input, >= 1.
    lengths: Int32
    #: [N] number of leading tokens of each input that have token type 0; the others have type 1.
    #: None: all have type 0.
    splits: Int32 | None = None

    def __post_init__(self) -> None:
        if prod(self.lengths.shape) > MAX_INPUTS:  # before they become objects
            raise ValueError(
                f"{prod(self.lengths.shape):,} inputs; a request can have at most {MAX_INPUTS:,}"
            )
        lengths = self.lengths.tolist()
        if len(self.tokens.shape) != 1 or len(self.lengths.shape) != 1 or not lengths:
            raise ValueError("an encode request needs at least one input")
        if min(lengths) < 1 or sum(lengths) != self.tokens.shape[0]:
            raise ValueError("the lengths of the inputs do not match their tokens")
        if self.splits is None:
            return
        if self.splits.shape != self.lengths.shape:
            raise ValueError("the splits of the inputs do not match their lengths")
        splits = self.splits.tolist()
        if any(not 0 <= split <= length for split, length in zip(splits, lengths, strict=True)):
            raise ValueError("the splits of the inputs do not match their lengths")


class PairPrompt(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The text that a pair of texts becomes for a model that reads one text. It is truncated at the
    end of its body."""

    prefix: str
    #: Contains `{query}`, `{document}`, and `{instruction}` if the model takes one.
    body: str
    suffix: str
    #: The instruction of requests that give none; empty: the model takes none.
    instruction: str = ""

    @property
    def plain(self) -> str:
        """Return the whole text with the default instruction."""
        body = self.body.replace("{instruction}", self.instruction)
        return self.prefix + body + self.suffix


class EncodingCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The inputs that a model encodes, and how (`ModelCard.encoding`)."""

    task: EncodeTask
    #: Most tokens of one input.
    max_tokens: int
    #: Numbers in the result of one input.
    size: int
    #: Empty for models that score.
    pooling: str = ""
    #: Whether the model's vectors have length 1.
    normalizes: bool = False
    #: How vectors are compared.
    similarity: Similarity = "cosine"
    #: Name of a prompt -> text that is put before an input.
    prompts: dict[str, str] = {}
    #: Name of the prompt of requests that name none; None: none.
    default_prompt: str | None = None
    #: The text that a pair becomes; None: the tokenizer joins the two texts.
    pair_prompt: PairPrompt | None = None
