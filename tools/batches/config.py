"""The options of `tidegate run-batch`."""

from __future__ import annotations

from typing import Annotated

from protocol.config.base import Config, about


class BatchRunConfig(Config, frozen=True, kw_only=True):
    """How the lines are sent to the server."""

    concurrency: Annotated[
        int,
        about(
            "most lines to send at the same time; 0: as many as the server computes at once",
            ge=0,
            le=1024,
        ),
    ] = 0
    timeout_s: Annotated[
        float,
        about("send a line again if it is not answered after this many seconds", ge=1, le=86400),
    ] = 600.0
    give_up_s: Annotated[
        float,
        about(
            "end the run if the server has answered no line for this many seconds; the same "
            "command continues it",
            ge=1,
            le=604800,
        ),
    ] = 900.0
