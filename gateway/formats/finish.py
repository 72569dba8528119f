"""Why an answer ended: decided here, for every API, streamed or whole."""

from __future__ import annotations

from protocol.messages import FinishReason


def finish_reason(
    engine: FinishReason | None, *, stop_matched: bool = False, completed_calls: int = 0
) -> str:
    """The reason shown to the client. Raises ValueError where nothing has ended the answer.

    | engine says   | stop string | calls completed | reason       |
    |---------------|-------------|-----------------|--------------|
    | anything      | matched     | none            | `stop`       |
    | anything      | matched     | some            | `tool_calls` |
    | error         | no          | any             | `error`      |
    | length        | no          | any             | `length`     |
    | abort         | no          | any             | `abort`      |
    | stop          | no          | none            | `stop`       |
    | stop          | no          | some            | `tool_calls` |

    `stop_matched` also stands for the only call that is allowed, once it is complete: it ends the
    answer as a stop string does.

    A stop string lies within tokens that the engine sent before its own end, so it came first, and
    the answer is whole: whether the limit is told in the same message or in the next, or is never
    reached because the request was aborted, changes nothing. Otherwise `length` always wins: calls
    that were completed do not hide that the rest was cut off.
    """
    if not stop_matched:
        if engine is None:
            raise ValueError("an answer that goes on has no finish reason")
        if engine != "stop":
            return engine
    return "tool_calls" if completed_calls else "stop"
