"""Checks that the engines of a disaggregated server compute bitwise equal results."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from protocol.engine.model_card import ModelCard

log = logging.getLogger(__name__)

NO_PROMISE = "none"
"""Logged in place of an empty `ModelCard.numerics`: the engine's results are not reproducible."""


class PairedNumerics:
    """Compares `ModelCard.numerics` of engines with the same model. If they differ, the server's
    model card no longer promises bitwise equal answers.

    An engine still counts after it has left, because other engines may have cached K/V that it
    computed.

    engines   in the log, what the engines are to each other
    """

    def __init__(self, engines: str = "engines that share K/V") -> None:
        self._engines = engines
        #: Digest of a model -> the first engine that had it, and its numerics.
        self._first: dict[str, tuple[str, str]] = {}
        #: Digests of models whose engines differ.
        self._differing: set[str] = set()
        self._is_logged: set[tuple[str, str]] = set()
        #: The last card whose numerics were removed: the original, and the copy without them.
        self._without: tuple[ModelCard, ModelCard] | None = None

    def add(self, engine: str, card: ModelCard) -> None:
        """Compare an engine with the first one that was added with the same model. If they differ,
        write one log line for this engine and its numerics.

        engine   the engine's name in the log
        """
        name, first = self._first.setdefault(card.digest, (engine, card.numerics))
        if card.numerics == first:
            return
        self._differing.add(card.digest)
        if (engine, card.numerics) not in self._is_logged:
            self._is_logged.add((engine, card.numerics))
            log.warning(
                "%s compute other bits: %s has fingerprint %s, %s has %s; answers can depend on "
                "which engine computes a prompt, and system_fingerprint promises nothing",
                self._engines,
                *(name, first or NO_PROMISE),
                *(engine, card.numerics or NO_PROMISE),
            )

    def promised(self, card: ModelCard) -> ModelCard:
        """Return the card, without its numerics if the engines differ. The same object is returned
        for the same card."""
        if card.digest not in self._differing or not card.numerics:
            return card
        if self._without is None or self._without[0] is not card:
            self._without = card, replace(card, numerics="")
        return self._without[1]
