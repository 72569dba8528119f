"""Probe of a compiled grammar: a few random walks that find faults before an answer meets them.

llguidance computes what may follow only when an answer gets there. A grammar that exceeds its
limits, or that no text satisfies, may therefore fail late. A few random walks, with fixed seeds,
find most of these faults at once. They prefer JSON's punctuation, which leads from one part of a
schema to the next; the inside of a string is like its beginning.

A fault that they miss ends the answer with an error (`row_results.py`).
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
"""For all walks together; a step of the largest grammars takes about 30 ms."""
SIGNS = (b'{"', b'["', b'":', b'"', b":", b",", b"{", b"[", b"}", b"]", b"0", b"null")
PREFERENCE = 0.8
DEAD_END = "NoExtensionBias"
"""Part of llguidance's message if nothing can follow but something must."""
_SOME_BIT = re.compile(rb"[^\0]")


class GrammarProbe:
    """Probes the grammars of one model."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        tokenized = map(tokenizer.tokenize_bytes, SIGNS)
        self._signs = [tokens[0] for tokens in tokenized if len(tokens) == 1]
        self._vocab_size = vocab_size

    def find_fault(self, inner: LLMatcher) -> str | None:
        """Return why answers cannot follow this grammar, or None if no fault was found."""
        deadline = perf_counter() + MAX_S
        for seed in range(NUM_WALKS):
            fault = self._walk(inner.deep_copy(), Random(seed), deadline)
            if fault is not None or perf_counter() > deadline:
                return fault
        return None

    def _walk(self, probe: LLMatcher, random: Random, deadline: float) -> str | None:
        """Take one walk.

        The first step, which is the slowest, is taken regardless of the deadline.
        """
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
        preferred = [token for token in self._signs if mask[token >> 3] >> (token & 7) & 1]
        if preferred and random.random() < PREFERENCE:
            return random.choice(preferred)
        start = random.randrange(len(mask))
        found = _SOME_BIT.search(mask, start) or _SOME_BIT.search(mask)
        assert found is not None, "a matcher that has not stopped admits a token"
        place = found.start()
        return place * 8 + random.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def _fault(probe: LLMatcher) -> str:
    why = explain(probe)
    if DEAD_END in why:
        return "no text satisfies it, or some text that it admits cannot be completed"
    return f"it is too large to be enforced ({why})"
