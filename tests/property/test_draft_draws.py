"""Many draws with drafts come as often as the model says: chi-square over pairs of tokens.

That each draw is that of plain decoding is tested seed by seed (tests/unit/test_runner_drafts.py);
this looks at the whole from outside, as if nothing were known of how drafts are verified.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import TinyModel, tiny_cache, tiny_runner, tiny_slots

PROMPT = [5, 9, 2, 77, 31]
ALLOWED = [3, 4, 5, 6, 7]
PARAMS = SamplingParams(temperature=1.3, allowed_token_ids=ALLOWED)
SLOTS, ROUNDS = 50, 40
BLOCKS = 2
"""Of 4 tokens each: the prompt, two drafts."""
ONE_IN_A_THOUSAND = 51.18
"""Of chi-square with 24 degrees of freedom."""

Pair = tuple[int, int]


class Listening(TinyModel):
    """Keeps its last logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.heard = super().logits(hidden)
        return self.heard


def chances(tokens: list[int]) -> list[float]:
    """Of each allowed token to come next, by the model's logits alone."""
    model = Listening()
    init = slot_init(0, tokens, blocks=[1, 2], params=PARAMS)
    plan = step_plan(bind=[init], zero=[1, 2], rows=[(0, 0, len(tokens), True)])
    tiny_runner(tiny_slots(1), tiny_cache(3), model).step(plan)
    scaled = model.heard[0, ALLOWED].double() / PARAMS.temperature
    said: list[float] = torch.softmax(scaled, 0).tolist()
    return said


def expected() -> dict[Pair, float]:
    return {
        (first, second): chance * then
        for first, chance in zip(ALLOWED, chances(PROMPT), strict=True)
        for second, then in zip(ALLOWED, chances([*PROMPT, first]), strict=True)
    }


def drawn(drafts: Pair) -> tuple[Counter[Pair], int]:
    """How often each pair came, and how many drafts were right."""
    runner = tiny_runner(tiny_slots(SLOTS), tiny_cache(1 + SLOTS * BLOCKS))
    counts: Counter[Pair] = Counter()
    right = 0
    for round_ in range(ROUNDS):
        binds = [
            slot_init(
                slot,
                PROMPT,
                generation=round_ + 1,
                blocks=[1 + slot * BLOCKS, 2 + slot * BLOCKS],
                seed=round_ * SLOTS + slot,
                params=PARAMS,
            )
            for slot in range(SLOTS)
        ]
        result = runner.step(
            step_plan(
                release=range(SLOTS) if round_ else [],
                bind=binds,
                zero=range(1, 1 + SLOTS * BLOCKS),
                rows=[(slot, 0, len(PROMPT) + 2, True) for slot in range(SLOTS)],
                drafts=dict.fromkeys(range(SLOTS), drafts),
            )
        )
        assert result.counts is not None
        tokens = iter(result.tokens.tolist())
        said = [[next(tokens) for _ in range(count)] for count in result.counts.tolist()]
        right += sum(map(len, said)) - SLOTS
        short = [slot for slot in range(SLOTS) if len(said[slot]) == 1]
        rows = [(slot, len(PROMPT), 1, True) for slot in short]
        for slot, token in zip(
            short, runner.step(step_plan(rows=rows)).tokens.tolist(), strict=True
        ):
            said[slot].append(token)
        counts.update((one[0], one[1]) for one in said)
    return counts, right


@pytest.mark.parametrize("choose", [max, min], ids=["likely drafts", "unlikely drafts"])
def test_pairs_come_as_often_as_the_model_says_whatever_is_guessed(choose) -> None:
    chance = expected()
    drafts = choose(chance, key=chance.__getitem__)
    counts, right = drawn(drafts)
    draws = SLOTS * ROUNDS
    statistic = sum((counts[p] - draws * c) ** 2 / (draws * c) for p, c in chance.items())
    assert sum(counts.values()) == draws
    assert set(counts) <= set(chance)
    assert statistic < ONE_IN_A_THOUSAND
    first = sum(c for p, c in chance.items() if p[0] == drafts[0])
    assert right / draws == pytest.approx(first + chance[drafts], abs=0.06), "p(draft), no less"
