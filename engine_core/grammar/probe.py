"""Probe of a compiled grammar: random walks that find faults before an answer does.

llguidance computes the tokens that may follow only when an answer gets to that point. So a grammar
that exceeds the limits, or that no text satisfies, may fail in the middle of an answer. A few
random walks with fixed seeds find most of these faults at once. They prefer the punctuation of
JSON, which leads quickly from one part of a schema to the next. Random letters would mostly extend
one string.

If the walks miss a fault, it ends the answer with an error (schedule/row_results.py).
"""

from __future__ import annotations

import re
from random import Random
from time import perf_counter

from llguidance import LLMatcher, LLTokenizer

from engine_core.grammar.masks import compute_masks
from engine_core.grammar.matcher import Matcher, explain

NUM_WALKS = 8
NUM_STEPS = 24
MAX_S = 0.25
"""Time limit of all walks together. A step of the largest grammars takes about 30 ms."""
PUNCTUATION = (b'{"', b'["', b'":', b'"', b":", b",", b"{", b"[", b"}", b"]", b"0", b"null")
PREFERENCE = 0.8
"""Probability of choosing punctuation if it is allowed."""
DEAD_END = "NoExtensionBias"
"""Part of llguidance's message if no token can follow, although the text is not complete."""
_NONZERO_BYTE = re.compile(rb"[^\0]")


class GrammarProbe:
    """Walks randomly through compiled grammars, with the tokens of one model."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        tokenized = map(tokenizer.tokenize_bytes, PUNCTUATION)
        self._punctuation = [tokens[0] for tokens in tokenized if len(tokens) == 1]
        self._vocab_size = vocab_size

    def find_fault(self, inner: LLMatcher) -> str | None:
        """Try the compiled grammar `inner` with random answers. Return why it cannot be enforced,
        or None if no fault was found. `inner` is not changed. The search stops after MAX_S
        seconds."""
        deadline = perf_counter() + MAX_S
        for seed in range(NUM_WALKS):
            fault = self._walk(inner.deep_copy(), Random(seed), deadline)
            if fault is not None or perf_counter() > deadline:
                return fault
        return None

    def _walk(self, probe: LLMatcher, random: Random, deadline: float) -> str | None:
        """Walk up to NUM_STEPS random tokens, and return the fault that was found, or None.

        The walk stops at the deadline, but never before its first step.
        """
        matcher = Matcher(probe)
        for step in range(NUM_STEPS):
            mask = bytes(compute_masks([matcher], self._vocab_size).data)
            if probe.is_stopped() and not probe.is_accepting():
                return _fault(probe)
            if probe.is_stopped() or (step and perf_counter() > deadline):
                return None
            matcher.consume(self._choose(mask, random))
        return _fault(probe) if probe.is_error() else None

    def _choose(self, mask: bytes, random: Random) -> int:
        """Return a random token of `mask`, with a preference for punctuation."""
        preferred = [token for token in self._punctuation if mask[token >> 3] >> (token & 7) & 1]
        if preferred and random.random() < PREFERENCE:
            return random.choice(preferred)
        start = random.randrange(len(mask))
        found = _NONZERO_BYTE.search(mask, start) or _NONZERO_BYTE.search(mask)
        assert found is not None, "a matcher that has not stopped admits a token"
        place = found.start()
        return place * 8 + random.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def _fault(probe: LLMatcher) -> str:
    why = explain(probe)
    if DEAD_END in why:
        return "no text satisfies it, or some text that it admits cannot be completed"
    return f"it is too large to be enforced ({why})"
