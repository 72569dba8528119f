"""What an engine did between two views, per second. Pure."""

from __future__ import annotations

import msgspec

from protocol.messages import EngineStatus


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """tokens       of answers, and computed: positions of prompts, answers and drafts
    cache_hits   of the prompt tokens that came, the share that was cached; None: none came
    drafts_right   of the tokens that were guessed ahead, the share that is in answers
    busy         share of the time in which the worker had something to do
    """

    tokens_per_s: float = 0.0
    computed_per_s: float = 0.0
    steps_per_s: float = 0.0
    requests_per_s: float = 0.0
    cache_hits: float | None = None
    drafts_right: float | None = None
    busy: float = 0.0


def rates(before: EngineStatus, now: EngineStatus) -> Rates:
    """All zero where no time has passed, or another engine's life has begun."""
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
