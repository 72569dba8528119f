"""Every model family in a real engine: greedy answers and their logprobs are those of transformers,
with prompts in chunks, a shared prefix, preemptions and drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.engine.sampling import SamplingParams
from tests.support.checkpoints import write_directory
from tests.support.eager import BLOCK_TOKENS, expected, some_tokens
from tests.support.family_models import MODEL_TYPES, RECURRENT, VARIANTS, random_model
from tests.support.replica import Replica, load

ATOL = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_greedy_answers_and_logprobs_are_those_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    """The models of families with windows have windows. A model is its own draft model, except if
    it has recurrent layers: then almost all drafts are wrong. A token may differ from the one that
    transformers chooses if the logits of both are almost equal."""
    variants = VARIANTS[model_type]
    changes = variants.get("windows", variants.get("window", {}))
    theirs, start = random_model(model_type, **changes), some_tokens(20)
    prompts = [start + some_tokens(count, seed=count) for count in (3, 9, 15, 21)]
    loaded = draft = load(write_directory(tmp_path / "model", theirs))
    if model_type in RECURRENT:
        draft = load(write_directory(tmp_path / "draft", random_model("llama")))
    replica = Replica(
        loaded,
        token_budget=16,
        num_blocks=28,
        block_tokens=BLOCK_TOKENS,
        options={"speculation": "model"},
        draft=draft,
    )
    answers = [*replica.answers(prompts[:1], PARAMS), *replica.answers(prompts[1:], PARAMS)]
    stats = replica.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens > 0 or draft is not loaded
    assert stats.num_cached_tokens > 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
        atol = ATOL * max(1.0, float(logits.abs().max()) / 10)
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logprobs.amax(1) - chosen).max() <= atol
        entries = [entry for output in replica.outputs[number] for entry in output.logprobs]
        ours = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(ours, chosen, rtol=0, atol=atol)
