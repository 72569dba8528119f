"""Fill in the middle: prompts for which a model writes the text between a prefix and a suffix.

Models that can do this have tokens that mark the two parts. `INFILL_MARKERS` lists the known sets
of tokens, with the order in which the parts stand:

    prefix first   [prefix] text [suffix] text [middle]
    suffix first   [suffix] text [prefix] text

A model is recognised by its tokens alone. If a GGUF file names the tokens (`InfillTokens`), those
ids are used, in the order of the known set or with the prefix first. All text is encoded without
control tokens, so a file whose text spells a marker cannot change the prompt's structure.

The sources are the model cards and tokenizers of the families, llama.cpp's list of token texts
(src/llama-vocab.cpp), and for the texts around the files of a repository its /infill route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.text.plain_text import PlainTextEncoder
from gateway.text.tokenizer import Offload, Tokenizer
from protocol.engine.model_card import InfillTokens, ModelCard
from protocol.wire.errors import InvalidRequest

InfillOrder = Literal["prefix first", "suffix first"]


@dataclass(frozen=True, slots=True)
class InfillMarkers:
    """The texts of the tokens of a family of models."""

    prefix: str
    suffix: str
    #: None: the model writes the middle directly after the second part.
    middle: str | None
    order: InfillOrder = "prefix first"


INFILL_MARKERS = (
    # Qwen (2.5-Coder, and the same tokenizer in later models), CodeGemma, Granite 4
    InfillMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder 2, Granite Code, Granite 3, Stable Code
    InfillMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    InfillMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek (Coder, V2, V3)
    InfillMarkers("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    # Code Llama
    InfillMarkers("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # the same without SentencePiece's space, from llama.cpp's list
    InfillMarkers("<PRE>", "<SUF>", "<MID>"),
    # GLM 4.5
    InfillMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Falcon H1 Tiny Coder
    InfillMarkers("<|prefix|>", "<|suffix|>", "<|middle|>"),
    # Codestral, and the same tokenizers in other models of Mistral
    InfillMarkers("[PREFIX]", "[SUFFIX]", None, "suffix first"),
)
REPOSITORY_MARKERS = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|reponame|>")
"""Tokens before the name of a repository; the first one that the model has is used."""
FILE_MARKERS = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>", "<|filename|>")
"""Tokens before each file of a repository; the first one that the model has is used."""
END_MARKERS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>")
"""Tokens with which training examples end, or were filled up. Not all models list them as EOS."""
REPOSITORY_NAME, CURRENT_FILE = "myproject\n", "filename\n"
"""Stand for the names that requests do not have, as in llama.cpp, to which editors are tuned."""
FILE_SEPARATOR = "\n\n--- snippet ---\n\n"
"""Separates files if the model has no token for that, as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class InfillFile:
    """Another file of the repository, as context."""

    name: str
    text: str
    #: Path of the text in the request, for errors.
    param: str = "text"


class InfillFormat:
    """How one model is prompted to fill in the middle. Made by `infill_format`."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        tokens: InfillTokens,
        order: InfillOrder,
        ends: Sequence[int],
    ) -> None:
        assert tokens.prefix is not None
        assert tokens.suffix is not None
        self.order: InfillOrder = order
        self._prefix, self._suffix = [tokens.prefix], [tokens.suffix]
        self._middle = [] if tokens.middle is None else [tokens.middle]
        self._repository = [] if tokens.repository is None else [tokens.repository]
        self._file = [] if tokens.file is None else [tokens.file]
        bos = card.bos_token_id
        self._bos = [bos] if bos is not None and tokenizer.encode("", True)[:1] == [bos] else []
        markers = [*self._prefix, *self._suffix, *self._middle, *self._repository, *self._file]
        pad = [] if tokens.pad is None else [tokens.pad]
        #: Tokens that end the middle, besides the model's end tokens. All markers are among them,
        #: because nothing after a marker belongs to the middle.
        self.ends: list[int] = list(dict.fromkeys([*ends, *pad, *markers]))
        self._encoder = PlainTextEncoder(tokenizer, self.ends)

    def prompt(
        self,
        prefix: str | list[int],
        suffix: str,
        *,
        files: Sequence[InfillFile] = (),
        max_tokens: int | None = None,
        offload: Offload | None = None,
        param: str = "prompt",
    ) -> tuple[list[int], int]:
        """Return (the prompt's token ids, number of files that were left out).

        prefix, suffix  the text before and after the gap; `prefix` may be token ids
        files           other files, the most important one last
        max_tokens      longest prompt; files that do not fit are left out, the first ones first.
                        None: no limit
        param           path of `prefix` in the request, for errors; that of `suffix` is "suffix"

        Raises the errors of `PlainTextEncoder.encode`.
        """
        before = prefix
        if isinstance(before, str):
            before = self._encoder.encode(before, offload=offload, param=param)
        # Code Llama and Codestral were trained without a space before the suffix.
        after = self._encoder.encode(suffix, continues=True, offload=offload, param="suffix")
        if self.order == "suffix first":
            parts = [*self._suffix, *after, *self._prefix, *before, *self._middle]
        else:
            parts = [*self._prefix, *before, *self._suffix, *after, *self._middle]
        room = None if max_tokens is None else max_tokens - len(self._bos) - len(parts)
        context, num_left_out = self._context(files, room, offload)
        return [*self._bos, *context, *parts], num_left_out

    def _context(
        self, files: Sequence[InfillFile], room: int | None, offload: Offload | None
    ) -> tuple[list[int], int]:
        """Return (the tokens of the files that fit in `room`, number of files left out)."""
        if not files:
            return [], 0
        head, tail = list(self._repository), list(self._file)
        if head:
            head += self._encoder.encode(REPOSITORY_NAME)
        if tail:
            tail += self._encoder.encode(CURRENT_FILE)
        chunks: list[list[int]] = []
        left = None if room is None else room - len(head) - len(tail)
        for file in reversed(files):
            if left is not None and left <= 0:
                break
            chunk = self._file_tokens(file, offload)
            if left is not None:
                left -= len(chunk)
                if left < 0:
                    break
            chunks.append(chunk)
        if not chunks:
            return [], len(files)
        context = [token for chunk in reversed(chunks) for token in chunk]
        return [*head, *context, *tail], len(files) - len(chunks)

    def _file_tokens(self, file: InfillFile, offload: Offload | None) -> list[int]:
        start = f"{file.name}\n" if self._file else FILE_SEPARATOR
        text = self._encoder.encode(start + file.text, offload=offload, param=file.param)
        return [*self._file, *text]


def infill_format(card: ModelCard, tokenizer: Tokenizer) -> InfillFormat | None:
    """Return how the model is prompted to fill in the middle; None if it has no tokens for that."""

    def token(text: str) -> int | None:
        token_id = tokenizer.token_id(text)
        return token_id if token_id is not None and token_id < card.vocab_size else None

    def first(texts: Sequence[str]) -> int | None:
        return next((each for each in map(token, texts) if each is not None), None)

    named = card.infill_tokens
    order: InfillOrder = "prefix first"
    for markers in INFILL_MARKERS:
        prefix, suffix = token(markers.prefix), token(markers.suffix)
        middle = token(markers.middle) if markers.middle is not None else None
        has_all = prefix is not None and suffix is not None
        if has_all and (middle is not None or markers.middle is None):
            order = markers.order
            break
    else:
        prefix, suffix, middle = named.prefix, named.suffix, named.middle
        if prefix is None or suffix is None or middle is None:
            return None
    tokens = InfillTokens(
        prefix=prefix if named.prefix is None else named.prefix,
        suffix=suffix if named.suffix is None else named.suffix,
        middle=middle if named.middle is None or order == "suffix first" else named.middle,
        pad=named.pad,
        repository=first(REPOSITORY_MARKERS) if named.repository is None else named.repository,
        file=first(FILE_MARKERS) if named.file is None else named.file,
    )
    ends = [each for each in map(token, END_MARKERS) if each is not None]
    try:
        return InfillFormat(card, tokenizer, tokens, order, ends)
    except InvalidRequest:  # the tokenizer cannot encode even the shortest texts
        return None
