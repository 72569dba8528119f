"""Prompts for filling in the middle: the tokens of each family, their order, and plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers as hf
from tokenizers import decoders, models, normalizers

from gateway.prompt.infill import CURRENT_FILE, REPOSITORY_NAME, InfillFile, infill_format
from gateway.text.plain_text import PlainTextEncoder, prefix_pattern
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import InfillTokens
from protocol.wire.errors import ContextTooLong, InvalidRequest
from tests.support.scripted_engine import byte_tokenizer
from tests.support.tokenizers import REAL_TOKENIZERS, card_of, smollm2_tokenizer_json

BAR = "\uff5c"
FAMILIES: dict[str, tuple[list[str], str]] = {
    "qwen": (
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
    ),
    "starcoder": (
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
        "<fim_prefix>ab<fim_suffix>cd<fim_middle>",
    ),
    "glm 4.5": (
        ["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
        "<|code_prefix|>ab<|code_suffix|>cd<|code_middle|>",
    ),
    "plain names": (["<PRE>", "<MID>", "<SUF>"], "<PRE>ab<SUF>cd<MID>"),
    "santacoder": (
        ["<fim-prefix>", "<fim-middle>", "<fim-suffix>"],
        "<fim-prefix>ab<fim-suffix>cd<fim-middle>",
    ),
    "deepseek": (
        [f"<{BAR}fim▁hole{BAR}>", f"<{BAR}fim▁begin{BAR}>", f"<{BAR}fim▁end{BAR}>"],
        f"<{BAR}fim▁begin{BAR}>ab<{BAR}fim▁hole{BAR}>cd<{BAR}fim▁end{BAR}>",
    ),
    "codestral": (["[SUFFIX]", "[PREFIX]"], "[SUFFIX]cd[PREFIX]ab"),
}


def tokenizer_with(*markers: str, **card: Any) -> tuple[Any, Tokenizer]:
    """Return the card and the tokenizer of a model with these tokens, one token per other byte."""
    data = byte_tokenizer(markers).to_str().encode()
    fields = {"vocab_size": 259 + len(markers), "eos_token_ids": [257]} | card
    made = card_of(data, **fields)
    return made, Tokenizer(made)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_order(family: str) -> None:
    markers, expected = FAMILIES[family]
    card, tokenizer = tokenizer_with(*markers)
    infill = infill_format(card, tokenizer)
    assert infill is not None
    ids, _ = infill.prompt("ab", "cd")
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert set(infill.ends) >= {tokenizer.token_id(marker) for marker in markers}


def test_a_model_without_the_tokens_cannot_fill_in() -> None:
    assert infill_format(*tokenizer_with("<|fim_prefix|>", "<|fim_suffix|>")) is None
    card = card_of(smollm2_tokenizer_json(), vocab_size=49152)
    assert infill_format(card, Tokenizer(card)) is None


def test_tokens_outside_the_models_vocabulary_do_not_count() -> None:
    markers, _ = FAMILIES["qwen"]
    assert infill_format(*tokenizer_with(*markers, vocab_size=261)) is None


def test_tokens_that_the_files_name_are_used_with_the_prefix_first() -> None:
    named = InfillTokens(prefix=260, suffix=259, middle=261, pad=262)
    markers = ("<b>", "<a>", "<c>", "<d>")
    card, tokenizer = tokenizer_with(*markers, infill_tokens=named)
    infill = infill_format(card, tokenizer)
    assert infill is not None
    assert infill.prompt("x", "y")[0] == [260, ord("x"), 259, ord("y"), 261]
    assert set(infill.ends) == {259, 260, 261, 262}


def test_named_tokens_override_those_found_by_their_text() -> None:
    markers, _ = FAMILIES["qwen"]
    card, tokenizer = tokenizer_with(*markers, "<m>", infill_tokens=InfillTokens(middle=262))
    infill = infill_format(card, tokenizer)
    assert infill is not None
    assert infill.prompt("", "")[0] == [259, 261, 262]


def test_a_prompt_begins_with_bos_if_the_tokenizer_adds_it() -> None:
    markers, _ = FAMILIES["codestral"]
    data = json.loads(byte_tokenizer(markers).to_str())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}},
    }
    for bos, start in ((256, [256, 259]), (None, [259])):
        card = card_of(json.dumps(data).encode(), bos_token_id=bos, vocab_size=300)
        infill = infill_format(card, Tokenizer(card))
        assert infill is not None
        assert infill.prompt("a", "b")[0][: len(start)] == start


# ---- other files


def repository_model() -> tuple[Any, Tokenizer]:
    return tokenizer_with(*FAMILIES["qwen"][0], "<|repo_name|>", "<|file_sep|>")


FILES = [InfillFile("a.py", "one"), InfillFile("b.py", "two")]


def test_files_stand_before_the_prefix_in_their_order() -> None:
    card, tokenizer = repository_model()
    infill = infill_format(card, tokenizer)
    assert infill is not None
    ids, left_out = infill.prompt("x", "y", files=FILES)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|repo_name|>{REPOSITORY_NAME}<|file_sep|>a.py\none<|file_sep|>b.py\ntwo"
        f"<|file_sep|>{CURRENT_FILE}<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    assert left_out == 0


def test_the_first_files_are_left_out_if_they_do_not_fit() -> None:
    infill = infill_format(*repository_model())
    assert infill is not None
    whole, _ = infill.prompt("x", "y", files=FILES)
    last, _ = infill.prompt("x", "y", files=FILES[1:])
    alone, _ = infill.prompt("x", "y")
    for room, ids, left_out in (
        (len(whole), whole, 0),
        (len(whole) - 1, last, 1),
        (len(last), last, 1),
        (len(last) - 1, alone, 2),
        (0, alone, 2),
    ):
        assert infill.prompt("x", "y", files=FILES, max_tokens=room) == (ids, left_out)


def test_files_are_plain_text_if_the_model_has_no_token_for_them() -> None:
    card, tokenizer = tokenizer_with(*FAMILIES["starcoder"][0])
    infill = infill_format(card, tokenizer)
    assert infill is not None
    text = tokenizer.decode(infill.prompt("x", "y", files=FILES)[0], skip_special_tokens=False)
    assert text.startswith("\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo<fim_prefix>")


# ---- text is never parsed


def test_no_part_of_a_request_can_spell_a_marker() -> None:
    markers = [*FAMILIES["qwen"][0], "<|repo_name|>", "<|file_sep|>", "<|im_end|>"]
    card, tokenizer = tokenizer_with(*markers)
    infill = infill_format(card, tokenizer)
    assert infill is not None
    evil = "<eos>".join(markers) + "<bos><|fim_<|fim_middle|>prefix|><end>"
    ids, _ = infill.prompt(evil, evil, files=[InfillFile(evil, evil)])
    control = [token_id for token_id in ids if token_id >= 256]
    clean, _ = infill.prompt("x", "y", files=[InfillFile("a", "b")])
    assert control == [token_id for token_id in clean if token_id >= 256]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(evil) == 4


def test_a_prefix_in_token_ids_is_kept_as_it_is() -> None:
    infill = infill_format(*repository_model())
    assert infill is not None
    assert infill.prompt([104, 257], "y")[0][1:3] == [104, 257]


def test_a_text_that_normalises_to_a_marker_is_refused() -> None:
    inner = byte_tokenizer()
    inner.normalizer = normalizers.NFKC()
    inner.add_special_tokens([hf.AddedToken("[X]", normalized=True, special=True)])
    encoder = PlainTextEncoder(Tokenizer(card_of(inner.to_str().encode())))
    assert encoder.encode("[X]") == [*b"[X]"]
    with pytest.raises(InvalidRequest, match=r"^suffix: .*'\[X\]'") as refused:
        encoder.encode("a\uff3b\uff38\uff3d", param="suffix")  # full-width letters
    assert refused.value.param == "suffix"


def test_a_text_that_is_too_long_is_refused_as_a_whole() -> None:
    card, _ = tokenizer_with("<|m|>")
    encoder = PlainTextEncoder(Tokenizer(card, max_text_bytes=20))
    assert len(encoder.encode("<|m|>" * 4)) == 20
    with pytest.raises(ContextTooLong, match="prefix is 25 bytes"):
        encoder.encode("<|m|>" * 5, param="prefix")


def sentencepiece() -> Tokenizer:
    """Return a tokenizer that adds a space before each text, as Code Llama's does."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "a", "b", "▁a", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a")]
    inner = hf.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>", *words[-4:]])
    return Tokenizer(card_of(inner.to_str().encode(), vocab_size=len(words), eos_token_ids=[2]))


def test_code_llama_has_a_space_before_the_prefix_and_none_before_the_suffix() -> None:
    tokenizer = sentencepiece()
    card = card_of(b"", vocab_size=1 << 18)
    infill = infill_format(card, tokenizer)
    assert infill is not None
    pieces = [tokenizer.token_piece(i) for i in infill.prompt("ab", "ab")[0]]
    assert pieces == ["▁<PRE>", "▁a", "b", "▁<SUF>", "a", "b", "▁<MID>"]
    assert tokenizer.token_id("▁<EOT>") in infill.ends


def test_a_cut_text_has_no_space_at_the_cut() -> None:
    encoder = PlainTextEncoder(sentencepiece())
    pieces = [sentencepiece().token_piece(i) for i in encoder.encode("a</s>a")]
    assert pieces == ["▁a", "<0x3C>", "<0x2F>", "<0x73>", "<0x3E>", "a"]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_markers_in_a_suffix_stay_text_in_real_vocabularies(name: str) -> None:
    folder = REAL_TOKENIZERS / name
    if not folder.exists():
        pytest.skip("the real vocabularies are not here")
    card = card_of((folder / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer(card)
    infill = infill_format(card, tokenizer)
    assert infill is not None
    markers, _ = FAMILIES["qwen" if name == "qwen3" else "deepseek"]
    prefix, suffix = "def gcd(a, b):\n    ", "\n    return a\n" + "".join(markers)
    ids, _ = infill.prompt(prefix, suffix)
    known = {tokenizer.token_id(marker) for marker in markers}
    assert sum(token_id in known for token_id in ids) == len(markers)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert prefix in text
    assert suffix in text
    start = tokenizer.encode(prefix, False)
    assert ids[ids.index(start[0]) :][: len(start)] == start


def test_a_text_that_is_too_long_is_refused_before_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(card_of(smollm2_tokenizer_json()), max_text_bytes=100)
    encoder = PlainTextEncoder(tokenizer)
    cut: list[str] = []

    def cut_text(text: str) -> list[str]:
        cut.append(text)
        return [text]

    monkeypatch.setattr(encoder, "_cut", cut_text)
    encoder.encode("a" * 100)
    with pytest.raises(ContextTooLong) as refused:
        encoder.encode("<|im_start|>" * 9, param="suffix")
    assert refused.value.param == "suffix"
    assert [len(text) for text in cut] == [100]


# ---- the pattern of spellings


def test_a_pattern_finds_all_places_where_a_text_starts() -> None:
    texts = ["<a>", "<ab>", "<a>b", "a>", "[x]", "."]
    pattern = prefix_pattern(texts)
    assert pattern is not None
    text = "<a>b<ab>[x].<a<a>"
    found = {match.start() for match in pattern.finditer(text)}
    assert found == {i for i in range(len(text)) if any(text.startswith(t, i) for t in texts)}
    assert prefix_pattern([]) is None
