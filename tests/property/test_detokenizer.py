"""The joined deltas equal the whole text decoded at once, for any ids and any cut."""

from __future__ import annotations

import random

import msgspec
import pytest

from gateway.text.codec import codec_of
from gateway.text.detokenizer import DetokenizerState, WindowDetokenizer
from gateway.text.tokenizer import Tokenizer
from tests.support.cpu_time import check_linear, cpu_s
from tests.support.tokenizers import FAMILY_NAMES, byte_fallback_json, card_of, cuts, tokenizer_of

TEXTS = [
    "The capital of France is Paris.",
    "👩🏽‍🚀 says: 你好世界! ¿Qué tal? مرحبا",
    "e\u0301 a\u0308 \U0001f1eb\U0001f1f7 क्षि \u200b\u2028 end",
    "\ufffd was in the text itself",
    "  two blanks, a\ttab,\r\n\n\n and 12345 digits",
]


def tokenizer(name: str) -> Tokenizer:
    if name in ("smollm2", *FAMILY_NAMES):
        return tokenizer_of(name)
    return Tokenizer(card_of(byte_fallback_json(decoder=name)))


real = pytest.mark.parametrize("name", ["smollm2", *FAMILY_NAMES])


def id_lists(tok: Tokenizer, seed: int) -> list[list[int]]:
    """Return the ids of texts, without and with special tokens between them, and random ids, some
    of which are unknown or only a part of a character.
    """
    rng = random.Random(seed)
    lists = []
    specials = sorted(tok.special_ids)
    for text in TEXTS:
        ids = tok.encode(text, False)
        lists.append(ids)
        lists.append([i for pair in ids for i in (pair, rng.choice(specials))])
    size = max(1000, *specials)
    lists += [[rng.randrange(size + 50) for _ in range(rng.randrange(1, 40))] for _ in range(40)]
    single_bytes = [tok.encode(text, False)[-1] for text in ("語", "\U0001fae8", "é", "a")]
    lists += [[rng.choice(single_bytes) for _ in range(12)] for _ in range(10)]
    return lists


def joined(tok: Tokenizer, pieces: list[list[int]], *, skip: bool) -> str:
    detokenizer = tok.detokenizer(skip_special_tokens=skip)
    return "".join([detokenizer.push(ids) for ids in pieces]) + detokenizer.finish()


@real
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_joined_are_the_whole_for_any_ids_and_any_cut(name: str, skip: bool) -> None:
    tok = tokenizer(name)
    for seed, ids in enumerate(id_lists(tok, seed=1)):
        whole = tok.decode(ids, skip_special_tokens=skip)
        assert joined(tok, [[i] for i in ids], skip=skip) == whole
        assert joined(tok, cuts(ids, seed), skip=skip) == whole
        assert joined(tok, [ids], skip=skip) == whole


@real
def test_no_delta_holds_half_a_character(name: str) -> None:
    tok = tokenizer(name)
    for text in TEXTS:
        if "\ufffd" not in text:
            detokenizer = tok.detokenizer()
            deltas = [detokenizer.push([i]) for i in tok.encode(text, False)]
            assert not [delta for delta in deltas if "\ufffd" in delta]
            assert detokenizer.finish() == ""


@real
def test_the_state_carries_over_as_plain_data_between_any_two_tokens(name: str) -> None:
    tok = tokenizer(name)
    ids = tok.encode(TEXTS[1], False)
    text, detokenizer = "", tok.detokenizer()
    for token_id in ids:
        text += detokenizer.push([token_id])
        wire = msgspec.msgpack.encode(detokenizer.state())
        state = msgspec.msgpack.decode(wire, type=DetokenizerState)
        detokenizer = tok.detokenizer(state=state)
    assert text + detokenizer.finish() == tok.decode(ids)


@pytest.mark.parametrize("name", ["strip", "metaspace"])
def test_a_sentencepiece_text_loses_its_first_blank_only_and_only_at_the_start(name: str) -> None:
    tok = tokenizer(name)
    hello, bos = tok.token_id("▁Hello"), tok.token_id("<s>")
    assert hello is not None
    assert bos is not None
    for ids in ([hello, hello], [bos, hello, hello], [hello, bos, hello]):
        assert joined(tok, [[i] for i in ids], skip=True) == "Hello Hello" == tok.decode(ids)
    continuing = tok.detokenizer(continues=True)
    assert continuing.push([hello]) == " Hello"


@pytest.mark.parametrize("name", ["strip", "metaspace"])
def test_sentencepiece_pieces_join_to_the_whole(name: str) -> None:
    tok, rng = tokenizer(name), random.Random(5)
    words = [tok.token_id(w) for w in ("▁", "▁▁", "▁a▁b", "▁world", "é", ",", "<s>", "語")]
    for seed in range(60):
        ids = [i for i in rng.choices(words, k=rng.randrange(1, 9)) if i is not None]
        whole = tok.decode(ids)
        assert joined(tok, cuts(ids, seed), skip=True) == whole
        assert joined(tok, [[i] for i in ids], skip=True) == whole


def test_single_byte_tokens_wait_until_they_are_a_character() -> None:
    tok = tokenizer("strip")
    ids = [tok.token_id(f"<0x{byte:02X}>") or 0 for byte in "é🤖".encode()]
    detokenizer = tok.detokenizer()
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "", "🤖"]


def test_bytes_that_can_never_be_a_character_are_replaced_at_once_and_the_rest_at_the_end() -> None:
    tok = tokenizer("strip")
    lead, stray, a = (tok.token_id(t) or 0 for t in ("<0xF0>", "<0xFF>", "<0x41>"))
    detokenizer = tok.detokenizer()
    assert detokenizer.push([stray]) == "\ufffd"
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([a]) == "\ufffdA"
    assert detokenizer.push([lead]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_decoder_that_is_not_understood_goes_through_a_window_and_still_joins() -> None:
    tok, rng = tokenizer("wordpiece"), random.Random(3)
    assert tok.codec is None
    words = [tok.token_id(w) for w in ("Hello", "##ing", ",", "</s>", "語", "ing")]
    for seed in range(40):
        ids = [i for i in rng.choices(words, k=rng.randrange(1, 30)) if i is not None]
        assert joined(tok, cuts(ids, seed), skip=True) == tok.decode(ids)


def test_a_window_that_continues_a_text_keeps_the_blank_before_its_first_word() -> None:
    tok = tokenizer("wordpiece")
    hello, suffix = tok.token_id("Hello") or 0, tok.token_id("##ing") or 0
    assert joined(tok, [[hello], [hello]], skip=False) == "Hello Hello"
    for ids, text in (([hello, hello], " Hello Hello"), ([suffix, hello], "ing Hello")):
        continuing = tok.detokenizer(continues=True)
        assert continuing.push(ids) + continuing.finish() == text


def test_the_window_does_not_grow_with_tokens_that_have_no_text() -> None:
    tok = tokenizer("wordpiece")
    hello, end = tok.token_id("Hello") or 0, tok.token_id("</s>") or 0
    detokenizer = tok.detokenizer()
    text = detokenizer.push([hello] + [end] * 10_000)
    assert len(msgspec.msgpack.encode(detokenizer.state())) < 100
    assert text + detokenizer.push([hello]) == "Hello Hello"


def test_the_window_holds_broken_characters_back_but_not_forever() -> None:
    spelled = {0: b"\xe8", 1: b"\xaa", 2: b"\x9e", 3: b"a"}

    def decode(ids: object) -> str:
        return b"".join(spelled[i] for i in ids).decode("utf-8", "replace")  # type: ignore[attr-defined]

    detokenizer = WindowDetokenizer(decode)
    assert [detokenizer.push([i]) for i in (3, 0, 1, 2, 3)] == ["a", "", "", "語", "a"]
    assert detokenizer.push([0] * 20).startswith("\ufffd" * 16)
    state = msgspec.msgpack.encode(detokenizer.state())
    restored = WindowDetokenizer.from_state(
        decode, msgspec.msgpack.decode(state, type=type(detokenizer.state()))
    )
    assert restored.finish() == detokenizer.finish() == "\ufffd" * 4


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "stop": 1}]},
    ],
)
def test_a_decoder_is_only_trusted_where_every_part_of_it_is_understood(
    decoder: dict[str, object] | None,
) -> None:
    assert codec_of(decoder) is None


def test_time_is_linear_in_the_number_of_tokens() -> None:
    tok = tokenizer("smollm2")
    ids = tok.encode(TEXTS[1], False)

    def push_all(repeats: int) -> None:
        detokenizer = tok.detokenizer()
        for token_id in ids * repeats:
            detokenizer.push([token_id])

    check_linear(lambda repeats: cpu_s(lambda: push_all(repeats)), 500)
