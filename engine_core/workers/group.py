"""Makes the workers of a group look like one: joins their reports, and checks that they agree."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine_core.workers.process import WorkerLost, name_of
from protocol.process.exit_codes import ExitCode
from protocol.worker.ranks import TokenDigest
from protocol.worker.steps import RankDigest, StepResult, WorkerReady

EQUAL = ("block_tokens", "kv_window", "kv_groups")
"""Fields that must be equal in all reports."""
LEAST = ("max_len", "max_slots", "token_budget", "num_blocks", "num_checkpoints")
"""Fields of which the group has the least value."""


class TokenAgreement:
    """Checks that all ranks of a group sample the same tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._digest = TokenDigest()
        #: Step -> digest of rank 0, until all other ranks have reported theirs.
        self._expected: dict[int, int] = {}
        #: Step -> digests of other ranks, by rank.
        self._reported: dict[int, dict[int, int]] = {}

    def on_result(self, result: StepResult) -> None:
        """Add a result of rank 0. Raises WorkerLost if another rank has other tokens."""
        if (digest := self._digest.add(result)) is not None:
            self._expected[digest.step] = digest.digest
            self._compare(digest.step)

    def on_digest(self, rank: int, digest: RankDigest) -> None:
        """Add the digest of another rank. Raises WorkerLost if it has other tokens than rank 0."""
        self._reported.setdefault(digest.step, {})[rank] = digest.digest
        self._compare(digest.step)

    def _compare(self, step: int) -> None:
        if step not in self._expected:
            return
        reported = self._reported.get(step, {})
        for rank, digest in reported.items():
            if digest != self._expected[step]:
                raise WorkerLost(
                    f"{name_of(rank, self._size)} has sampled other tokens than rank 0, in a step "
                    f"up to {step}"
                )
        if len(reported) == self._size - 1:
            del self._expected[step], self._reported[step]


def joint_ready(reports: Mapping[int, WorkerReady]) -> WorkerReady:
    """Return the report of rank 0, with limits that all ranks keep.

    reports   rank -> its report

    Raises WorkerLost if a rank has another model or another layout of the KV cache than rank 0.
    """
    first = reports[0]
    for rank, report in sorted(reports.items()):
        name = name_of(rank, len(reports))
        if (report.model.digest, report.model.dtype) != (first.model.digest, first.model.dtype):
            raise WorkerLost(
                f"{name} has loaded another model than rank 0: {_model(report)}, not "
                f"{_model(first)}",
                ExitCode.BAD_MODEL,
            )
        for field in EQUAL:
            if getattr(report, field) != getattr(first, field):
                raise WorkerLost(f"{name} and rank 0 have different values of {field}")
    least = {field: min(getattr(each, field) for each in reports.values()) for field in LEAST}
    return replace(first, **least)


def _model(report: WorkerReady) -> str:
    model = report.model
    return f"{model.name} ({model.digest[:8]}, {model.dtype})"
