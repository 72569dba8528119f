"""Converts responses of a token endpoint back to engine outputs, and replays the outputs to a
choice group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from gateway.api.openai.responses import TokenChance
from gateway.api.tokens.responses import ChosenToken, GeneratedChoice, GenerateUsage
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice, PromptRequest
from gateway.served_model import ServedModel
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output, Usage
from protocol.engine.sampling import MAX_LOGPROBS, SamplingParams, check_token_ids
from protocol.wire.errors import InvalidRequest


class _NoEngine:
    """The engine client of a group whose outputs were generated elsewhere. It sends nothing."""

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a recorded response is never generated")

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a recorded response is never generated")

    def abort(self, request: int, reason: str, *, on_freed: object = None) -> None:
        pass


class RecordedGroup(ChoiceGroup):
    """A choice group whose outputs another engine has generated.

    prompt_tokens  number of prompt tokens; None: count the token ids
    """

    def __init__(
        self, prompt_requests: Sequence[PromptRequest], prompt_tokens: int | None = None
    ) -> None:
        super().__init__(_NoEngine(), prompt_requests)
        self._prompt_tokens = prompt_tokens

    def replay(self, choice: Choice, output: Output) -> None:
        """Process one engine output of a choice. Raises the exceptions of its parser."""
        self._on_output(choice, output)

    @property
    def num_prompt_tokens(self) -> int:
        return super().num_prompt_tokens if self._prompt_tokens is None else self._prompt_tokens


class RecordedOutputs:
    """Converts the choices of a token endpoint's response or chunk to engine outputs.

    at            path of the response or chunk in the request
    num_logprobs  number of top tokens in the derendered response; None: it has no logprobs
    extra_ids     further token ids whose logprobs the derendered response has
    """

    def __init__(
        self,
        at: str,
        model: ServedModel,
        *,
        num_logprobs: int | None,
        extra_ids: Sequence[int],
        usage: GenerateUsage | None = None,
    ) -> None:
        self._at = at
        self._model = model
        self._num_logprobs = num_logprobs
        self._extra_ids = extra_ids
        self._usage = usage

    def output(self, part: GeneratedChoice, params: SamplingParams, place: int) -> Output:
        """Return the engine output for `part`, a choice of the response. Raise InvalidRequest,
        naming the field, if a token id is invalid or the logprobs do not match the tokens.

        place  index of `part` in `choices`, for errors
        """
        at = f"{self._at}.choices[{place}]"
        check_token_ids(part.token_ids, self._model.card.vocab_size, f"{at}.token_ids")
        stop_token = None
        if part.finish_reason == "stop" and not isinstance(part.stop_reason, str):
            stop_token = _stop_token(part.token_ids, params, self._model.card.eos_token_ids)
        return Output(
            request=0,
            tokens=part.token_ids,
            logprobs=self._logprobs(part, at),
            finish=part.finish_reason,
            stop_token=stop_token,
            usage=self._engine_usage(),
        )

    def _engine_usage(self) -> Usage | None:
        usage = self._usage
        if usage is None or usage.prompt_tokens_details is None:
            return None
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )

    def _logprobs(self, part: GeneratedChoice, at: str) -> list[TokenLogprobs]:
        if self._num_logprobs is None:
            return []
        content = part.logprobs.content if part.logprobs else []
        if len(content) != len(part.token_ids):
            raise InvalidRequest.at(
                f"{at}.logprobs",
                f"must have one item per token ({len(part.token_ids):,}), because "
                f"the request has logprobs; got {len(content):,}",
            )
        return [to_token_logprobs(token, self._num_logprobs, self._extra_ids) for token in content]


def num_logprobs(choices: Sequence[GeneratedChoice]) -> int | None:
    """Return the largest number of top tokens of a sampled token; None if there are no logprobs.
    `top_logprobs` also contains the sampled token, which counts only if it is a top token."""
    counts = [
        len(token.top_logprobs) - ((token.rank or 0) > len(token.top_logprobs))
        for choice in choices
        if choice.logprobs is not None
        for token in choice.logprobs.content
    ]
    has_any = any(choice.logprobs is not None for choice in choices)
    return min(max([0, *counts]), MAX_LOGPROBS) if has_any else None


def _stop_token(
    ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int]
) -> int | None:
    """Return the last token if it is a stop token, else None."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    return ids[-1] if ids and ids[-1] in ends else None


def to_token_logprobs(token: ChosenToken, num_top: int, extra_ids: Sequence[int]) -> TokenLogprobs:
    """Return the engine's logprobs of a sampled token: the inverse of `tokens.stream.chosen_token`.

    num_top    number of top tokens to return
    extra_ids  further token ids whose logprobs to return; a missing logprob becomes NaN
    """
    logprob_of = {top.token_id: top.logprob for top in token.top_logprobs}
    others = {
        top.rank: (top.token_id, top.logprob)
        for top in token.top_logprobs
        if top.rank is not None and top.token_id != token.token_id
    }
    tops = [others[rank] for rank in sorted(others)]
    if len(tops) < num_top:  # the sampled token is a top token, and its rank is free
        place = next(rank for rank in range(1, num_top + 1) if rank not in others)
        tops.insert(place - 1, (token.token_id, token.logprob))
    return TokenLogprobs(
        token.token_id,
        token.logprob,
        token.rank or 0,
        [token_id for token_id, _ in tops],
        [logprob for _, logprob in tops],
        [logprob_of.get(token_id, math.nan) for token_id in extra_ids],
    )


def prompt_entries(
    ids: Sequence[int], logprobs: Sequence[dict[str, TokenChance] | None], at: str
) -> list[TokenLogprobs]:
    """Return the engine's logprobs of a prompt, from its second token on. `logprobs` is the JSON
    that `prompt_token_logprobs` makes, and `at` is its path in the request. Raise InvalidRequest,
    naming the path, if `logprobs` does not match the prompt."""
    if len(logprobs) != len(ids):
        raise InvalidRequest.at(
            at, f"must have one item per prompt token ({len(ids):,}); got {len(logprobs):,}"
        )
    return [
        _prompt_entry(token_id, chances or {}, f"{at}[{place}]")
        for place, (token_id, chances) in enumerate(zip(ids, logprobs, strict=True))
        if place
    ]


def _prompt_entry(token_id: int, chances: dict[str, TokenChance], at: str) -> TokenLogprobs:
    own = chances.get(str(token_id))
    if own is None:
        raise InvalidRequest.at(at, f"must contain the prompt's own token {token_id}")
    try:
        found = [(int(name), chance) for name, chance in chances.items()]
    except ValueError:
        raise InvalidRequest.at(at, "every key must be a token id") from None
    found.sort(key=lambda pair: pair[1].rank)
    # The top tokens have consecutive ranks from 1; the prompt's own token may rank far lower.
    tops = [pair for rank, pair in enumerate(found, start=1) if pair[1].rank == rank]
    return TokenLogprobs(
        token_id, own.logprob, own.rank, [i for i, _ in tops], [c.logprob for _, c in tops]
    )
