"""Compares answers to the same prompts with and without drafts.

`python -m tests.support.drafted` runs a hundred prompts through the default model, greedily,
without drafts, with n-grams, and with the model as its own draft model (some minutes).

In float32 the last bits of logits depend on the number of positions computed at once. So two
answers may differ, but only from a place where two tokens were about equally likely.
"""

from __future__ import annotations

import json

from protocol.engine.sampling import SamplingParams
from tests.support.reference import GOLDEN
from tests.support.replica import Replica, load
from worker.loading.decoder import LoadedModel

TIE = 1e-3
"""Largest difference between the best two logprobs of a token at which answers may differ."""
NEAR = 1e-3
"""Largest difference of a token's logprob with and without drafts."""
NUM_PROMPTS = 100


def replica_of(
    loaded: LoadedModel,
    speculation: str,
    num_blocks: int = 1024,
    *,
    draft: LoadedModel | None = None,
    **more: object,
) -> Replica:
    """Return a replica with this kind of speculation. Without `draft` the model is its own draft
    model. The engine's cost of a draft step is 0."""
    return Replica(
        loaded,
        num_blocks=num_blocks,
        options={"speculation": speculation},
        draft=(draft or loaded) if speculation == "model" else None,
        **more,  # type: ignore[arg-type]
    )


def prompts() -> list[list[int]]:
    """Return short prompts: the starts of recorded conversations, and pieces from their ends,
    because answers tend to repeat themselves."""
    rows = [row["prompt"] + row["tokens"] for row in json.loads(GOLDEN.read_text())]
    cuts = [tokens[:40] for tokens in rows] + [tokens[-24:] for tokens in rows]
    cuts += [tokens[-48:-7] for tokens in rows] + [tokens[-31:-2] for tokens in rows]
    return cuts[:NUM_PROMPTS]


def is_same(one: Replica, two: Replica, number: int) -> bool:
    """Return whether both replicas answered request `number` with the same tokens.

    Raises AssertionError if the first different tokens were not about equally likely (TIE), or if
    the logprobs of a token before them differ (NEAR).
    """
    first, second = (
        [entry for output in replica.outputs[number] for entry in output.logprobs]
        for replica in (one, two)
    )
    assert len(first) == len(second) == len(one.tokens(number)) == len(two.tokens(number))
    for a, b in zip(first, second, strict=True):
        if a.token_id != b.token_id:
            assert a.top_logprobs[0] - a.top_logprobs[1] < TIE
            return False
        assert abs(a.logprob - b.logprob) < NEAR
    return True


def main() -> None:
    from tests.support.model import smollm2_gguf

    loaded = load(smollm2_gguf())
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    plain = replica_of(loaded, "none")
    plain.answers(prompts(), params)
    steps = plain.engine.stats().num_steps
    for speculation in ("ngram", "model"):
        fast = replica_of(loaded, speculation)
        fast.answers(prompts(), params)
        equal = sum(is_same(plain, fast, number) for number in range(NUM_PROMPTS))
        stats = fast.engine.stats()
        print(
            f"{speculation}: {equal} of {NUM_PROMPTS} answers equal; the others part at ties. "
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts right, "
            f"{stats.num_steps} steps instead of {steps}",
            flush=True,
        )


if __name__ == "__main__":
    main()
