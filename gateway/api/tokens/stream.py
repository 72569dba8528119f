"""Writes the response of the token endpoint, as a stream of chunks or as one JSON object.

    [chunk of one choice ...]  [usage, timings]  [DONE]

- A chunk has the new tokens of one choice. A choice's last chunk also has its finish reason.
- In mode "tokens" without logprobs, everything except the new token ids is encoded once per choice.
- After an error, one `{"error": ...}` event and [DONE] close the stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.requests import includes_usage, repeats_usage
from gateway.api.openai.responses import (
    AnswerWarning,
    ChatLogprobs,
    PromptTokensDetails,
    error_body,
)
from gateway.api.tokens.requests import GenerateBody
from gateway.api.tokens.responses import (
    ChosenToken,
    GenerateChunk,
    GeneratedChoice,
    GeneratedTextChoice,
    GenerateResponse,
    GenerateTextChunk,
    GenerateTextResponse,
    GenerateUsage,
    TokensLogprobs,
    TopToken,
)
from gateway.formats.events import Content, Event, Finished, OutputDelta
from gateway.generation import kv_params
from gateway.generation.frame_sink import FrameDestination, FrameSink
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.sinks import CollectSink
from gateway.http import sse
from gateway.http.errors import HTTPFault
from gateway.observe.timings import timings_of_group
from gateway.served_model import ServedModel
from gateway.text.logprobs import chat_logprobs, json_logprob, prompt_token_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs

encode = msgspec.json.encode
_HOLE = [-1]
"""Placeholder for the token ids in a template."""


@dataclass(frozen=True, slots=True)
class GenerateEnvelope:
    """The members of a response that do not depend on its choices, and the format of the
    choices."""

    #: The response id, as sent to the client.
    id: str
    #: The model name from the request.
    model: str
    fingerprint: str
    #: The digest of the model's weights.
    digest: str
    body: GenerateBody
    tokenizer: Tokenizer
    #: Request fields that had no effect.
    ignored: Sequence[str] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_request(
        cls, body: GenerateBody, model: ServedModel, request_id: str, ignored: Sequence[str]
    ) -> GenerateEnvelope:
        return cls(
            id=f"generate-tokens-{request_id}",
            model=body.model or model.names[0],
            fingerprint=model.fingerprint,
            digest=model.card.digest,
            body=body,
            tokenizer=model.tokenizer,
            ignored=ignored,
        )

    @property
    def includes_text(self) -> bool:
        return self.body.output_mode == "text"

    @property
    def ignored_params(self) -> list[str] | UnsetType:
        return list(self.ignored) or UNSET

    def part(self, choice: Choice, delta: OutputDelta) -> GeneratedChoice:
        """Return a choice with the tokens of `delta`."""
        last = delta.events[-1] if delta.events else None
        fields: dict[str, Any] = {
            "index": choice.index,
            "token_ids": delta.token_ids,
            "logprobs": self._logprobs(delta.logprobs),
        }
        if isinstance(last, Finished):
            # The token API has no tool calls.
            reason = "stop" if last.reason == "tool_calls" else last.reason
            fields |= {"finish_reason": reason, "stop_reason": last.stop_reason}
        if self.includes_text:
            return GeneratedTextChoice(**fields, text=text_of(delta.events))
        return GeneratedChoice(**fields)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Any:
        sampling = self.body.sampling_params
        if sampling.logprobs is None:
            return None
        logprob_ids = sampling.logprob_token_ids or ()
        if not self.includes_text:
            return TokensLogprobs([chosen_token(entry, logprob_ids) for entry in entries])
        content = chat_logprobs(
            self.tokenizer, entries, num_top=sampling.logprobs, extra_ids=logprob_ids
        )
        return ChatLogprobs(content, None)


def warnings_of(choices: Sequence[Choice]) -> list[AnswerWarning] | UnsetType:
    """Return the warnings about choices that have ended; UNSET if there are none. Those about tool
    calls are left out, because this API has none."""
    return [
        AnswerWarning.from_event(choice.warning, choice.index)
        for choice in choices
        if choice.warning is not None
    ] or UNSET


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def chosen_token(entry: TokenLogprobs, extra_ids: Sequence[int]) -> ChosenToken:
    """Return a sampled token with its top tokens.

    The top tokens are the sampled token, the most likely tokens by rank, and the tokens of
    logprob_token_ids, whose rank is unknown. A token is listed once.
    """
    drawn = iter(entry.drawn_logprobs) if entry.drawn_logprobs else None
    chosen = _top(entry.token_id, entry.logprob, entry.rank, drawn)
    tops = {entry.token_id: chosen}
    for rank, (token_id, logprob) in enumerate(
        zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
    ):
        tops.setdefault(token_id, _top(token_id, logprob, rank, drawn))
    for token_id, logprob in zip(extra_ids, entry.asked_logprobs, strict=False):
        tops.setdefault(token_id, _top(token_id, logprob, None, drawn))
    return ChosenToken(**msgspec.structs.asdict(chosen), top_logprobs=list(tops.values()))


def _top(
    token_id: int, logprob: float, rank: int | None, drawn: Iterator[float] | None
) -> TopToken:
    """Return one top token. Each call takes the next logprob from `drawn`, the logprobs in the
    distribution sampled from; None if these were not requested."""
    other = json_logprob(next(drawn)) if drawn is not None else UNSET
    return TopToken(
        token_id=token_id, logprob=json_logprob(logprob), rank=rank, sampling_logprob=other
    )


def whole_response(group: ChoiceGroup, collected: CollectSink, envelope: GenerateEnvelope) -> bytes:
    """Return the complete response of a group that ended without an error, as JSON."""
    (prompt_request,) = group.prompt_requests
    sampling, first = envelope.body.sampling_params, group.choices[0]
    parts = [envelope.part(choice, collected.whole[choice.index]) for choice in group.choices]
    chances = None
    if sampling.prompt_logprobs is not None:
        chances = prompt_token_logprobs(
            envelope.tokenizer, first.prompt_logprobs, sampling.prompt_logprobs
        )
    fields: dict[str, Any] = {
        "request_id": envelope.id,
        "model": envelope.model,
        "created": envelope.created,
        "system_fingerprint": envelope.fingerprint,
        "weights_digest": envelope.digest,
        "usage": usage_of(group),
        "prompt_logprobs": chances,
        "prompt_token_ids": prompt_request.prompt_ids if envelope.body.return_token_ids else None,
        "kv_transfer_params": kv_params.response_kv_params(group),
        "ignored_params": envelope.ignored_params,
        "warnings": warnings_of(group.choices),
        "choices": parts,
        "timings": timings_of_group(group),
    }
    kind = GenerateTextResponse if envelope.includes_text else GenerateResponse
    return encode(kind(**fields))


def usage_of(group: ChoiceGroup) -> GenerateUsage:
    """Return the usage summed over all choices. Each prompt is counted once."""
    return _usage(group, group.num_generated_tokens, group.num_cached_tokens)


def _usage(group: ChoiceGroup, num_tokens: int, num_cached: int) -> GenerateUsage:
    prompt = group.num_prompt_tokens
    return GenerateUsage(
        prompt_tokens=prompt,
        completion_tokens=num_tokens,
        total_tokens=prompt + num_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached),
    )


class GenerateStream(FrameSink):
    """The sink that writes one answer as chunks."""

    def __init__(
        self, group: ChoiceGroup, destination: FrameDestination, envelope: GenerateEnvelope
    ) -> None:
        super().__init__(group, destination)
        body = envelope.body
        self._envelope = envelope
        self._has_started = False
        #: Number of tokens sent of each choice. Counted only if each chunk has a usage.
        self._num_sent = [0] * len(group.choices)
        self._is_plain = not (
            envelope.includes_text
            or repeats_usage(body.stream_options)
            or body.sampling_params.logprobs is not None
        )
        self._templates = [self._template(choice) for choice in group.choices]

    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        last = delta.events[-1] if delta.events else None
        if self._is_plain and self._has_started and (last is None or type(last) is Content):
            return encode(delta.token_ids).join(self._templates[choice.index])
        if isinstance(last, Finished) or delta.token_ids or text_of(delta.events):
            return self._chunk(choice, delta, is_last=isinstance(last, Finished))
        return b""

    def closing(self) -> bytes:
        more: dict[str, Any] = {"timings": timings_of_group(self._group)}
        if includes_usage(self._envelope.body.stream_options):
            more |= {"usage": usage_of(self._group), "kv_transfer_params": None}
        is_empty = more == {"timings": UNSET}
        last = b"" if is_empty else self._frame([], **more, weights_digest=self._envelope.digest)
        return last + sse.DONE

    def failed(self, fault: HTTPFault) -> bytes:
        return sse.frame(error_body(fault)) + sse.DONE

    def _chunk(self, choice: Choice, delta: OutputDelta, *, is_last: bool) -> bytes:
        envelope, more = self._envelope, dict[str, Any]()
        if not self._has_started:
            self._has_started = True
            more["ignored_params"] = envelope.ignored_params
            if envelope.body.return_token_ids:
                more["prompt_token_ids"] = choice.prompt_request.prompt_ids
        if is_last:
            more |= {"kv_transfer_params": None, "weights_digest": envelope.digest}
            more["warnings"] = warnings_of([choice])
        if repeats_usage(envelope.body.stream_options):
            self._num_sent[choice.index] += len(delta.token_ids)
            num_sent = self._num_sent[choice.index]
            more["usage"] = _usage(self._group, num_sent, choice.num_cached)
        return self._frame([envelope.part(choice, delta)], **more)

    def _frame(self, choices: list[GeneratedChoice], **more: Any) -> bytes:
        envelope = self._envelope
        kind: type[GenerateChunk] = GenerateTextChunk if envelope.includes_text else GenerateChunk
        chunk = kind(
            request_id=envelope.id,
            system_fingerprint=envelope.fingerprint,
            choices=choices,
            **more,
        )
        return sse.frame(encode(chunk))

    def _template(self, choice: Choice) -> list[bytes]:
        """Return the frame of a chunk with only token ids, cut where the ids are inserted."""
        part = self._envelope.part(choice, OutputDelta([], _HOLE))
        return self._frame([part]).rsplit(encode(_HOLE), 1)
