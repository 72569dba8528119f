"""The finish reason of an answer, decided in one place for every API, streamed or whole."""

from __future__ import annotations

from protocol.messages import FinishReason


def finish_reason(
    engine: FinishReason | None, *, stop_matched: bool = False, completed_calls: int = 0
) -> str:
    """Return the finish reason for the client. Raise ValueError if nothing has ended the answer.

    | engine says   | stop string | calls completed | reason       |
    |---------------|-------------|-----------------|--------------|
    | anything      | matched     | none            | `stop`       |
    | anything      | matched     | some            | `tool_calls` |
    | error         | no          | any             | `error`      |
    | length        | no          | any             | `length`     |
    | abort         | no          | any             | `abort`      |
    | stop          | no          | none            | `stop`       |
    | stop          | no          | some            | `tool_calls` |

    `stop_matched` is also true if the only call that is allowed is complete: it ends the answer as
    a stop string does.

    A stop string lies within tokens that the engine sent before its own end. So the stop string
    came first and the answer is complete, even if the engine reports a limit in the same message or
    the next one, or never reaches it because the request was aborted. Otherwise `length` always
    wins: completed calls do not hide that the rest was cut off.
    """
    if not stop_matched:
        if engine is None:
            raise ValueError("an unfinished answer has no finish reason")
        if engine != "stop":
            return engine
    return "tool_calls" if completed_calls else "stop"
