"""Walk a little way into a compiled grammar before a stream could fail in it, or wait for it.

llguidance computes what may follow only when an answer is there, so a grammar that is too large
for its limits, or that no text satisfies, may say so late. A few random walks, the same ones every
time, find most such places at once: they like JSON's own signs best, for those lead from one part
of a schema to the next, and the inside of a string is like its beginning.

What they do not find ends the answer with an error in the same words (`outcome.py`).
"""

from __future__ import annotations

import re
from random import Random
from time import perf_counter

from llguidance import LLMatcher, LLTokenizer

from engine_core.grammar.masks import fill
from engine_core.grammar.matcher import Matcher, explain

NUM_WALKS = 8
NUM_STEPS = 24
MAX_S = 0.25
"""Of all walks together; a step of the largest grammars takes some 30 ms."""
SIGNS = (b'{"', b'["', b'":', b'"', b":", b",", b"{", b"[", b"}", b"]", b"0", b"null")
LIKES_SIGNS = 0.8
DEAD_END = "NoExtensionBias"
"""What llguidance says where nothing can follow, and something must."""
_SOME_BIT = re.compile(rb"[^\0]")


class GrammarProbe:
    """Of one model's grammars."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        spelt = map(tokenizer.tokenize_bytes, SIGNS)
        self._signs = [tokens[0] for tokens in spelt if len(tokens) == 1]
        self._vocab_size = vocab_size

    def find_fault(self, inner: LLMatcher) -> str | None:
        """Why answers cannot be held to this grammar; None: no reason was found."""
        deadline = perf_counter() + MAX_S
        for seed in range(NUM_WALKS):
            fault = self._walk(inner.deep_copy(), Random(seed), deadline)
            if fault is not None or perf_counter() > deadline:
                return fault
        return None

    def _walk(self, probe: LLMatcher, random: Random, deadline: float) -> str | None:
        """At least the first step is taken, whatever it takes: it is also the slowest."""
        matcher = Matcher(probe)
        for step in range(NUM_STEPS):
            mask = bytes(fill([matcher], self._vocab_size).data)
            if probe.is_stopped() and not probe.is_accepting():
                return _fault(probe)
            if probe.is_stopped() or (step and perf_counter() > deadline):
                return None
            matcher.consume(self._choose(mask, random))
        return _fault(probe) if probe.is_error() else None

    def _choose(self, mask: bytes, random: Random) -> int:
        likes = [token for token in self._signs if mask[token >> 3] >> (token & 7) & 1]
        if likes and random.random() < LIKES_SIGNS:
            return random.choice(likes)
        start = random.randrange(len(mask))
        found = _SOME_BIT.search(mask, start) or _SOME_BIT.search(mask)
        assert found is not None, "a matcher that has not stopped admits a token"
        place = found.start()
        return place * 8 + random.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def _fault(probe: LLMatcher) -> str:
    why = explain(probe)
    if DEAD_END in why:
        return "no text satisfies it, or one that has begun as it says cannot be completed"
    return f"it is too large to be enforced ({why})"
