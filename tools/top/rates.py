"""Rates per second between two views of an engine. Pure."""

from __future__ import annotations

import msgspec

from protocol.messages import EngineStatus


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one engine between two views."""

    #: Generated tokens.
    tokens_per_s: float = 0.0
    #: Computed positions of prompts, answers and drafts.
    computed_per_s: float = 0.0
    steps_per_s: float = 0.0
    requests_per_s: float = 0.0
    #: Share of the new prompt tokens that were cached; None: there were none.
    cache_hits: float | None = None
    #: Share of the draft tokens that were accepted; None: there were none.
    drafts_right: float | None = None
    #: Share of the time in which the worker computed.
    busy: float = 0.0


def rates(before: EngineStatus, now: EngineStatus) -> Rates:
    """Return the rates between two views; all zero if no time passed or the engine restarted."""
    seconds = now.now_s - before.now_s
    old, new = before.stats, now.stats
    if seconds <= 0 or new.num_steps < old.num_steps:
        return Rates()

    def grown(field: str) -> float:
        return float(getattr(new, field) - getattr(old, field))

    ended = sum(new.num_finished.values()) - sum(old.num_finished.values())
    return Rates(
        tokens_per_s=grown("num_generated_tokens") / seconds,
        computed_per_s=grown("num_computed_tokens") / seconds,
        steps_per_s=grown("num_steps") / seconds,
        requests_per_s=ended / seconds,
        cache_hits=_share(grown("num_cached_tokens"), grown("num_prompt_tokens")),
        drafts_right=_share(grown("num_accepted_tokens"), grown("num_draft_tokens")),
        busy=min(1.0, grown("busy_s") / seconds),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
