"""The running digest by which the ranks of a group are compared: it covers all sampled tokens.

Every rank samples for itself, and must draw the tokens that rank 0 draws. A rank that differed
would compute with other tokens from then on, and all later answers would be wrong.
"""

from __future__ import annotations

import zlib

from protocol.worker.steps import RankDigest, StepResult

DIGEST_STEPS = 16
"""Number of results after which a rank reports its digest."""


class TokenDigest:
    """The digest of the tokens of one rank. All ranks add the results of the same steps."""

    def __init__(self) -> None:
        self._value = 0
        self._num_results = 0

    def add(self, result: StepResult) -> RankDigest | None:
        """Add the tokens of a step. Return the digest after every DIGEST_STEPS results."""
        self._value = zlib.crc32(result.tokens.data, self._value)
        self._num_results += 1
        if self._num_results % DIGEST_STEPS:
            return None
        return RankDigest(step=result.step, digest=self._value)
