"""`tidegate why`: says where the time of a request went, while it runs and some minutes after.

It gets the timeline from the engine, so the times in the gateway are not part of it. The gateway's
GET /v1/requests/ID/timeline has these, too.
"""

from __future__ import annotations

import argparse

import msgspec

from protocol.engine.messages import RequestTimelines
from protocol.engine.timeline import EngineTimeline
from protocol.sdk.client import Client
from protocol.shared.explain import duration, ended, explain, headline
from protocol.shared.request_ids import MIN_BEGINNING_CHARS, choose, several
from protocol.wire.errors import ServingError
from tools.failure import Failure
from tools.processes.discovery import add_engine_options, connect
from tools.terminal import clean

DESCRIPTION = """\
Explain where the time of a request went: the queue, prompts of others, its own prompt, the
requests that decoded with it, preemptions. The request is open, or has ended some minutes ago. The
command connects to the engine directly, so it works when HTTP is down. It exits with code 1 if the
engine does not know the request.
"""

EXAMPLES = """\
examples:
  tidegate why chatcmpl-7f3a9c            the id from the response, or from tidegate top
  tidegate why chatcmpl-7f3a9c --json     with all stages and steps
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="ID",
        help="request to explain; the beginning of its id is enough (at least "
        f"{MIN_BEGINNING_CHARS} characters), if no other request has it",
    )
    parser.add_argument("--json", action="store_true", help="print the timeline as JSON")
    add_engine_options(parser, takes_argument=True)


def run(options: argparse.Namespace) -> int:
    with connect(options, "why") as engine:
        try:
            found = find_timelines(engine, options.name)
        except ServingError as error:
            raise Failure(str(error)) from None
    if options.json:
        print(msgspec.json.encode(found.timelines).decode())
    elif found.timelines:
        print("\n\n".join("\n".join(_lines(timeline)) for timeline in found.timelines))
    else:
        print(_unknown(options.name, found))
    return 0 if found.timelines else 1


def find_timelines(engine: Client, text: str) -> RequestTimelines:
    """Return the timelines of the requests with the id `text`, or of the one whose id begins so.
    Raises Failure if several ids begin with `text`, and ServingError if the engine is lost."""
    found = engine.get_timelines([text])
    if found.timelines:
        return found
    found = engine.get_timelines([text], are_beginnings=True)
    names = choose((timeline.name for timeline in found.timelines), text)
    if len(names) > 1:
        raise Failure(several(clean(text), map(clean, names)), exit_code=2)
    return found


def _unknown(name: str, found: RequestTimelines) -> str:
    return (
        f"{clean(name)}: no request with this id is open or has ended recently; the engine keeps "
        f"the last {found.kept:,} requests after their end, each for up to "
        f"{found.kept_s / 60:.0f} minutes"
    )


def _lines(timeline: EngineTimeline) -> list[str]:
    reasons = explain(timeline)
    facts = [
        ended(timeline),
        f"{timeline.prompt_tokens:,} + {timeline.generated_tokens:,} tokens",
        *([f"account {timeline.account}"] if timeline.account else []),
        *([f"sent by {timeline.client}"] if timeline.client else []),
    ]
    lines = [f"{clean(timeline.name)}: {clean(headline(reasons, timeline.took_s))}"]
    lines.append(f"  {clean(', '.join(facts))}")
    return lines + [f"  {duration(reason.seconds):>9}  {clean(reason.text)}" for reason in reasons]
