"""Finds the tokens of DRY's sequence breakers, which a request gives as texts.

A breaker can begin within a token and end within another one. So every token that contains the
whole text is a breaker. A token that ends with the first part of the text is the head of a breaker,
and the tokens of the rest are its tail. Tokens with the same tail are one `DryBreaker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.engine.sampling import MAX_BREAKER_HEADS, MAX_BREAKER_TAIL, DryBreaker
from protocol.wire.errors import InvalidRequest

FIELD = "dry_sequence_breakers"
USUAL_BREAKERS = ("\n", ":", '"', "*")
"""The breakers of a request that uses DRY and gives none, as in llama.cpp."""
MAX_CACHED = 64
"""Most lists of breakers whose tokens are cached for each tokenizer, 0.6 MB or less each."""
Tail = tuple[int, ...]


def find_breakers(
    texts: Sequence[str], tokens: Iterable[bytes], encode: Callable[[str], list[int]]
) -> list[DryBreaker]:
    """Return the breakers of texts that are not empty. Raise InvalidRequest, naming the field, if
    they have too many tokens.

    tokens   the bytes of each token, in the order of their ids
    encode   returns the token ids of a text that follows another one
    """
    wanted = [(text.encode(), _rests(text, encode)) for text in texts]
    heads: dict[Tail, list[int]] = {}
    for token_id, data in enumerate(tokens):
        tails: dict[Tail, None] = {}
        for text, rests in wanted:
            if text in data:
                tails[()] = None
            elif rests and data.endswith(tuple(rests)):
                tails |= {rests[start]: None for start in rests if data.endswith(start)}
        for tail in tails:
            heads.setdefault(tail, []).append(token_id)
    count = sum(map(len, heads.values()))
    if count > MAX_BREAKER_HEADS:
        raise InvalidRequest.at(
            FIELD,
            f"{count:,} tokens of this model contain one of the texts, or begin one; the limit is "
            f"{MAX_BREAKER_HEADS:,}",
        )
    return [DryBreaker(ids, list(tail)) for tail, ids in heads.items()]


def _rests(text: str, encode: Callable[[str], list[int]]) -> Mapping[bytes, Tail]:
    """Return each beginning of a text -> the tokens of its rest. The text is not divided within a
    character."""
    return {
        text[:size].encode(): tuple(encode(text[size:])[:MAX_BREAKER_TAIL])
        for size in range(1, len(text))
    }
