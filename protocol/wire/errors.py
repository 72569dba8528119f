"""The error tree. The branch of an error shows whose fault it is.

ServingError
├── RequestError          the caller's fault: the message is sent to the caller
│   ├── InvalidRequest      "invalid_request"           names the field in `param`
│   ├── ContextTooLong      "context_length_exceeded"   the message gives both token counts
│   ├── UnknownModel        "model_not_found"
│   ├── UnknownRequest      "request_not_found"         no open or recently ended request
│   ├── Overloaded          "overloaded"                retry after `retry_after_s`
│   ├── QueueTimeout        "queue_timeout"             not started in time; retry as above
│   ├── TimedOut            "timeout"                   not finished in time
│   └── LimitReached        "rate_limit_exceeded"       a limit of this caller; retry as above
├── EngineError           our fault: the message is for the log and for operators
│   ├── EngineLost          "engine_lost"               the engine ended, restarted or was silent
│   ├── EngineNotReady      "engine_not_ready"          the engine is loading, or not started
│   ├── NoEngine            "no_engine"                 this server has no engine
│   ├── StepFailed          "step_failed"               the computation of this request failed
│   ├── StaleAdapter        "stale_adapter"             its adapter was replaced under its name
│   ├── AttachmentMissing   "attachment_missing"        the engine lacks an image: send it again
│   ├── DownloadFailed      "download_failed"           a model could not be downloaded
│   ├── DiskFull            "disk_full"                 a model needs more space than is free
│   └── Draining            "draining"                  new requests are refused
└── WireError             a message is malformed; it is dropped and counted

On the wire an error is an `ErrorInfo`. Each API family maps `code` to its own status and JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec

from protocol.wire.field_words import shown


class ContextExcess(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The numbers of a prompt or an input that is too long. Each API puts them into the words that
    its clients search for.

    num_tokens   length of the text
    max_tokens   most tokens of prompt and answer together, or of one input
    is_estimate  `num_tokens` was estimated, because a text of this size is not tokenized
    is_of_key    `max_tokens` is the limit of the caller's key, not of the model
    """

    num_tokens: int
    max_tokens: int
    is_estimate: bool = False
    is_of_key: bool = False

    @property
    def words(self) -> str:
        """The words that follow the name of the text. Clients read both numbers, so they have no
        commas, and the first one is larger. If only the answer does not fit, the second one is the
        most tokens of a prompt."""
        most = min(self.max_tokens, self.num_tokens - 1)
        about = "about " if self.is_estimate else ""
        return f"is too long: {about}{self.num_tokens} tokens > {most} maximum"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error as it is sent between processes. `code` is one of the codes in the tree above.

    stands_s   for a refusal: seconds for which the engine refuses every request of the account,
               so clients need not send any. 0: another request might be accepted
    excess     the numbers of a text that is longer than the context; None: the error is another
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    stands_s: float = 0.0
    excess: ContextExcess | None = None


class ServingError(Exception):
    """Base of all errors.

    param           path of the field at fault, such as "logit_bias.12" or "messages[2].content"
    retry_after_s   seconds after which the caller should try again
    stands_s        see ErrorInfo
    excess          see ErrorInfo
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        stands_s: float = 0.0,
        excess: ContextExcess | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.stands_s = stands_s
        self.excess = excess

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            stands_s=self.stands_s,
            excess=self.excess,
        )


class RequestError(ServingError):
    pass


class InvalidRequest(RequestError):
    code = "invalid_request"

    @classmethod
    def at(cls, field: str, problem: str) -> Self:
        """Return an error about the field at the path `field`. The message starts with the path."""
        return cls(f"{field}: {problem}", param=field)

    @classmethod
    def wrong(cls, field: str, allowed: str, value: Any) -> Self:
        """Return an error about the value of a field: "stop: must be a string; got 5".

        allowed  what the field may be, in words
        """
        return cls.at(field, f"must be {allowed}; got {shown(value)}")


class InvalidImage(InvalidRequest):
    """Raised in a gateway if an image of a request cannot be used. The path in it is that of the
    client's own request, also if that is translated into a request of another API."""


class ContextTooLong(RequestError):
    code = "context_length_exceeded"

    @classmethod
    def of(
        cls, excess: ContextExcess, param: str, *, what: str = "your prompt", note: str = ""
    ) -> ContextTooLong:
        """Return the error of a text that is too long, in the words that clients search for:
        those of OpenAI, and after "However" those of Anthropic.

        param  path of the field with the text
        what   the text, in words
        note   a reason or a remedy, which follows in brackets
        """
        whose = " with this key" if excess.is_of_key else ""
        return cls(
            f"This model's maximum context length is {excess.max_tokens} tokens{whose}. However, "
            f"{what} {excess.words}{f' ({note})' if note else ''}",
            param=param,
            excess=excess,
        )


class UnknownModel(RequestError):
    code = "model_not_found"


class UnknownRequest(RequestError):
    code = "request_not_found"


class Overloaded(RequestError):
    code = "overloaded"


class QueueTimeout(RequestError):
    code = "queue_timeout"


class TimedOut(RequestError):
    code = "timeout"


class LimitReached(RequestError):
    code = "rate_limit_exceeded"


class EngineError(ServingError):
    code = "engine_error"


class EngineLost(EngineError):
    code = "engine_lost"


class EngineNotReady(EngineError):
    code = "engine_not_ready"


class NoEngine(EngineError):
    code = "no_engine"


class StepFailed(EngineError):
    code = "step_failed"


class StaleAdapter(EngineError):
    code = "stale_adapter"


class AttachmentMissing(EngineError):
    code = "attachment_missing"


class DownloadFailed(EngineError):
    code = "download_failed"


class DiskFull(EngineError):
    code = "disk_full"


class Draining(EngineError):
    code = "draining"


class WireError(ServingError):
    code = "wire"


_SENT: list[type[ServingError]] = [
    *RequestError.__subclasses__(),
    EngineError,
    *EngineError.__subclasses__(),
    WireError,
]
_BY_CODE = {kind.code: kind for kind in _SENT}


def error_from(info: ErrorInfo) -> ServingError:
    """Return the exception that `info` describes; an EngineError if its code is unknown."""
    kind = _BY_CODE.get(info.code, EngineError)
    return kind(
        info.message,
        param=info.param,
        retry_after_s=info.retry_after_s,
        stands_s=info.stands_s,
        excess=info.excess,
    )
