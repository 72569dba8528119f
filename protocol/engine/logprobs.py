"""The logprobs of a token, as an engine reports them in an `Output`."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs (natural logarithms of probabilities) at the position of one token.

    They are computed from the model's distribution, before temperature and filters. For sampled
    tokens, `SamplingParams.logprobs_of` can select the distribution that the token was drawn from.

    rank             1 if the token is the most likely one
    top_ids          the most likely tokens, best first, without impossible ones
    top_logprobs     the logprobs of `top_ids`
    asked_logprobs   the logprobs of the request's `logprob_token_ids`, in their order; empty for
                     prompt tokens
    drawn_logprobs   if both distributions were requested: logprobs in the distribution that the
                     token was drawn from, of token_id, then of top_ids, then of `logprob_token_ids`
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    asked_logprobs: list[float] = []
    drawn_logprobs: list[float] = []
