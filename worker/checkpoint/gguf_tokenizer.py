"""Rebuilds a tokenizer.json from a GGUF file, and reads its templates and defaults. Needs no torch.

A file has one of five kinds of tokenizer. "gpt2" is byte-level BPE with explicit merges. "llama"
is SentencePiece BPE with a score per piece and byte fallback; "gemma4" is the same with explicit
merges. "bert" is WordPiece. "t5" is
SentencePiece's unigram model (gguf_unigram.py).

A GGUF file does not describe its pre-tokenizer, which splits the text before merging. It only names
a family of tokenizers; `Family` describes the pre-tokenizer of each. The output is built as plain
dicts, because the library that reads it runs in the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from protocol.engine.model_card import SamplingDefaults
from worker.checkpoint.generation_config import log_unapplied, out_of_bounds
from worker.checkpoint.gguf_roles import end_tokens, infill_tokens, token_id
from worker.checkpoint.gguf_tokens import (
    CONTROL,
    SPACE,
    UNKNOWN,
    Marker,
    Part,
    added_tokens,
    encoder_markers,
    numbers,
    strings,
    template,
    template_step,
)
from worker.checkpoint.gguf_unigram import unigram
from worker.checkpoint.text import TOOL_USE, TextFacts
from worker.errors import UnusableModel
from worker.spec.fields import Fields

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3_SPLIT = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
QWEN2_SPLIT = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST
QWEN35_SPLIT = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _BLANKS
)
HUNYUAN_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS,
)
"""Those of the dense Hunyuan and of DeepSeek-V3, one after the other."""
SEED_SPLIT = _CONTRACTIONS + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CASED_WORDS = (
    rf"{_BEFORE_WORD}[{_UPPER}]*[{_LOWER}]+%s|{_BEFORE_WORD}[{_UPPER}]+[{_LOWER}]*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
)
"""Words that end where an upper-case letter follows a lower-case one. The placeholders are for what
may follow each of the two kinds of words, and for how many digits stay together."""
TEKKEN_SPLIT = _CASED_WORDS % ("", "", "") + _BLANKS
GPT4O_SPLIT = _CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}") + _BLANKS


def _bytes(*, use_regex: bool) -> Part:
    """Return the step that maps bytes to characters. `use_regex` first splits as GPT-2 does."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(regex: str) -> Part:
    """Return the step that splits the text into the matches of `regex`."""
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True, slots=True)
class Family:
    """Rules of one family of byte-level BPE tokenizers, which GGUF files do not store."""

    #: Steps of the pre-tokenizer.
    steps: tuple[Part, ...]
    normalizer: Part | None = None
    #: Whether a piece that is itself a token becomes that token without merges.
    ignore_merges: bool = False
    #: Whether a BOS token is added if the file does not contain the setting.
    adds_bos: bool = False

    @property
    def pre_tokenizer(self) -> Part:
        return {"type": "Sequence", "pretokenizers": list(self.steps)}


GPT2 = Family((_bytes(use_regex=True),))
DIGITS = Family(({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)))
COHERE = replace(DIGITS, normalizer={"type": "NFC"})
LLAMA3 = Family((_split(LLAMA3_SPLIT), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True)
DBRX = replace(LLAMA3, ignore_merges=False, adds_bos=False)
QWEN2 = Family((_split(QWEN2_SPLIT), _bytes(use_regex=False)), normalizer={"type": "NFC"})
QWEN35 = replace(QWEN2, steps=(_split(QWEN35_SPLIT), _bytes(use_regex=False)))
HUNYUAN = Family((*map(_split, HUNYUAN_SPLITS), _bytes(use_regex=False)))
SEED = Family((_split(SEED_SPLIT), _bytes(use_regex=False)))
TEKKEN = Family((_split(TEKKEN_SPLIT), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True)
GPT4O = Family((_split(GPT4O_SPLIT), _bytes(use_regex=False)))

FAMILIES = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "exaone4", "granite-docling"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), DIGITS),
    "command-r": COHERE,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), LLAMA3
    ),
    "glm4": replace(LLAMA3, adds_bos=False),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), QWEN2),
    "hunyuan-dense": HUNYUAN,
    "qwen35": QWEN35,
    "seed-coder": SEED,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), GPT4O),
}
"""Value of `tokenizer.ggml.pre` -> family."""


ENCODERS = ("bert", "t5")
"""Values of `tokenizer.ggml.model` of models that write no answers."""
CONTINUES = "##"
"""WordPiece's prefix of tokens that continue a word."""


def tokenizer_json(fields: Fields) -> bytes:
    """Return the tokenizer.json that the file's metadata describe.

    Raises UnusableModel, naming the key that is missing or has an unsupported value.
    """
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(fields)
    elif kind == "llama":
        parts = _sentencepiece(fields)
    elif kind == "gemma4":
        parts = _sentencepiece(fields, has_merges=True)
    elif kind == "bert":
        parts = _wordpiece(fields)
    elif kind == "t5":
        parts = unigram(fields)
    else:
        raise UnusableModel(
            f"tokenizer model {kind!r} is not supported, only 'gpt2', 'llama', 'gemma4', 'bert' "
            "and 't5'"
        )
    whole = {"version": "1.0", "truncation": None, "padding": None, **parts}
    return msgspec.json.encode(whole)


def _byte_level(fields: Fields) -> Part:
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in FAMILIES:
        raise UnusableModel(
            f"pre-tokenizer {name!r} is not supported, only {', '.join(sorted(FAMILIES))}"
        )
    family: Family = FAMILIES[name]
    tokens = strings(fields, "tokens")
    vocab = _vocab(tokens)
    merges = [merge.split(" ") for merge in strings(fields, "merges")]
    _check_merges(merges, vocab)
    return {
        "added_tokens": added_tokens(tokens, numbers(fields, "token_type", len(tokens))),
        "normalizer": family.normalizer,
        "pre_tokenizer": family.pre_tokenizer,
        "post_processor": _post_processor(fields, adds_bos=family.adds_bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocab, merges, ignore_merges=family.ignore_merges),
    }


def _sentencepiece(fields: Fields, *, has_merges: bool = False) -> Part:
    """Return the parts of a SentencePiece tokenizer.

    has_merges   whether the file has a list of merges; otherwise they follow from the scores
    """
    tokens = strings(fields, "tokens")
    vocab = _vocab(tokens)
    if has_merges:
        merges = [_halves(merge) for merge in strings(fields, "merges")]
        _check_merges(merges, vocab)
    else:
        merges = _merges_by_score(vocab, numbers(fields, "scores", len(tokens)))
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0)
    prefixed = fields.flag("tokenizer.ggml.add_space_prefix", not has_merges)
    to_spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    from_spaces = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    prefix = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "added_tokens": added_tokens(tokens, numbers(fields, "token_type", len(tokens))),
        "normalizer": {"type": "Sequence", "normalizers": prefix + to_spaces},
        "pre_tokenizer": None,
        "post_processor": _post_processor(fields, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [*from_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(
            vocab,
            merges,
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _wordpiece(fields: Fields) -> Part:
    """Return the parts of a BERT tokenizer.

    A file marks the tokens that start a word with SPACE. tokenizer.json marks the others, which
    continue a word. A file does not say whether texts are mapped to lower case: they are if no
    token that starts a word has a capital letter.
    """
    tokens = strings(fields, "tokens")
    kinds = numbers(fields, "token_type", len(tokens))
    special = {tokens[i] for i, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL)}
    words = {token[1:] for token in tokens if token.startswith(SPACE)}
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 100)
    if not 0 <= unknown < len(tokens):
        raise UnusableModel(f"tokenizer.ggml.unknown_token_id is {unknown}")
    return {
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": all(word == word.lower() for word in words),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(fields, tokens),
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": 100,
            "vocab": _vocab([_as_wordpiece(token, special) for token in tokens]),
        },
    }


def _as_wordpiece(token: str, special: set[str]) -> str:
    if token.startswith(SPACE):
        return token[1:]
    is_whole = token in special or (token.startswith("[") and token.endswith("]"))
    return token if is_whole else CONTINUES + token


def _around(fields: Fields, tokens: list[str]) -> Part:
    """Return the step that adds the CLS token before, and the SEP token after each text."""
    before, after = encoder_markers(fields, tokens, ("[CLS]", "[SEP]"))
    first = template(before, "A", after, 0)
    return template_step(first, first + template({}, "B", after, 1), before | after)


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Part:
    return {"type": "BPE", "dropout": None, "vocab": vocab, "merges": merges, **options}


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Return token -> id. If tokens are equal, the first one is used."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) < len(tokens):
        for index in range(len(tokens) - 1, -1, -1):
            vocab[tokens[index]] = index
    return vocab


def _check_merges(merges: list[list[str]], vocab: dict[str, int]) -> None:
    """Check that every merge joins two tokens into a third, as the gateway's library requires."""
    for merge in merges:
        if len(merge) == 2:
            left, right = merge
            if left in vocab and right in vocab and left + right in vocab:
                continue
        raise UnusableModel(f"merge {' '.join(merge)!r} does not join two tokens into a third")


def _halves(merge: str) -> list[str]:
    """Return the two tokens of a merge. The space between them is not its first character."""
    cut = merge.find(" ", 1)
    return [merge[:cut], merge[cut + 1 :]] if cut > 0 else [merge]


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Return all pairs of pieces that form a piece: best score first, then longest left part."""
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in vocab and (right := piece[cut:]) in vocab:
                ranked.append((-scores[index], -cut, index, left, right))
    ranked.sort()  # an index and a cut occur together once, so the texts are never compared
    return [[left, right] for *_, left, right in ranked]


def _post_processor(fields: Fields, *, adds_bos: bool) -> Part | None:
    """Return the step that adds BOS before and EOS after the text; None if it would add neither."""
    before = _marker(fields, "bos", wanted=fields.flag("tokenizer.ggml.add_bos_token", adds_bos))
    after = _marker(fields, "eos", wanted=fields.flag("tokenizer.ggml.add_eos_token", False))
    if not before and not after:
        return None
    first, second = (
        template(before, name, after, type_id) for name, type_id in (("A", 0), ("B", 1))
    )
    return template_step(first, first + second, before | after)


def _marker(fields: Fields, name: str, *, wanted: bool) -> Marker:
    """Return {token: id} of the BOS or EOS token; empty unless it is `wanted` and in the file."""
    tokens = strings(fields, "tokens")
    index = fields.integer(f"tokenizer.ggml.{name}_token_id", -1)
    return {tokens[index]: index} if wanted and 0 <= index < len(tokens) else {}


def gguf_text(fields: Fields, vocab_size: int) -> TextFacts:
    tokens: Any = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise UnusableModel(f"the tokenizer does not fit a vocabulary of {vocab_size:,}")
    bos, eos, unknown, padding = (
        token_id(fields, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding")
    )
    named = {"bos": bos, "eos": eos, "unk": unknown, "pad": padding}
    is_encoder = fields.text("tokenizer.ggml.model") in ENCODERS
    return TextFacts(
        tokenizer=tokenizer_json(fields),
        eos_token_ids=[] if is_encoder else end_tokens(fields, tokens),
        bos_token_id=bos,
        pad_token_id=padding,
        special_tokens={f"{n}_token": tokens[i] for n, i in named.items() if i is not None},
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        tool_use_template=fields.text(f"tokenizer.chat_template.{TOOL_USE}", "") or None,
        defaults=_defaults(fields, len(tokens)),
        license=fields.text("general.license", "") or None,
        infill_tokens=infill_tokens(fields, len(tokens)),
    )


UNAPPLIED = ("sequence", "xtc_probability", "penalty_last_n", "mirostat")
"""Keys of `general.sampling` that are not applied. Those beside them have no effect alone."""


def _defaults(fields: Fields, num_tokens: int) -> SamplingDefaults:
    """Return the sampling defaults, and log in one line which ones are not applied."""

    def number(name: str) -> float | None:
        key = f"general.sampling.{name}"
        return None if fields.get(key) is None else fields.number(key)

    top_k = fields.get("general.sampling.top_k")
    suppressed = fields.get("tokenizer.ggml.suppress_tokens", [])
    if not isinstance(suppressed, list) or not set(map(type, suppressed)) <= {int}:
        raise UnusableModel("tokenizer.ggml.suppress_tokens is not a list of token ids")
    defaults, invalid = SamplingDefaults(
        temperature=number("temp"),
        top_p=number("top_p"),
        top_k=None if top_k is None else fields.integer("general.sampling.top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
        bad_words_ids=[[token] for token in suppressed if 0 <= token < num_tokens] or None,
    ).checked()
    unapplied = [f"{name} {out_of_bounds(each)}" for name, each in invalid.items()]
    unapplied += [name for name in UNAPPLIED if fields.get(f"general.sampling.{name}")]
    log_unapplied("the GGUF file's sampling parameters", unapplied)
    return defaults
