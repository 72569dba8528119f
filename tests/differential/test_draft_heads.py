"""Heads for multi-token prediction: their logits are those of a reference in plain torch, and the
answers with their drafts are the same as without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from msgspec.structs import replace
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import MAX_HEAD_LAG
from tests.support.draft_heads import (
    ATOL,
    MODEL_TYPES,
    ReferenceHead,
    check_proposals,
    write_with_head,
)
from tests.support.eager import BLOCK_TOKENS, EagerStepper, some_tokens
from tests.support.examples import examples
from tests.support.family_models import SPARSE_NEMOTRON
from tests.support.gguf_heads import write_gguf_with_head
from tests.support.head_schedules import FEW, DraftedModel, HeadSchedule
from tests.support.kernels import native_kernels
from tests.support.paged import PagedRow, attention_batch
from tests.support.quantized_files import FORMATS, quantized_copies
from tests.support.replica import Executed, Replica, load, load_own_head
from worker.kv.cache import make_cache
from worker.loading.decoder import LoadedModel
from worker.loading.draft_head import LoadedHead
from worker.spec.kv_blocks import BlockLayers


@pytest.mark.parametrize("is_compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_logits_of_a_head_are_those_of_the_reference(
    tmp_path: Path, model_type: str, is_compiled: bool
) -> None:
    reference = write_with_head(tmp_path, model_type, hidden_size=192 if is_compiled else 96)
    loaded = load(tmp_path, kernels=native_kernels() if is_compiled else None)
    head = load_own_head(tmp_path, loaded)
    tokens = some_tokens(30, seed=3)
    stepper = EagerStepper(loaded, [tokens])
    layers, cpu = BlockLayers.of(head.spec), torch.device("cpu")
    cache = make_cache(layers, 20, BLOCK_TOKENS, torch.float32, cpu)
    found = []
    for start, count in ((0, 11), (11, 18)):
        batch = attention_batch([PagedRow(start, count, [*range(3, 11)])], BLOCK_TOKENS)
        hidden = reference.model_hidden(tokens)[start : start + count]
        following = torch.tensor(tokens[start + 1 : start + count + 1])
        states = head.model(following, hidden, batch, cache, stepper.attention)
        found.append(head.model.logits(states))
    torch.testing.assert_close(torch.cat(found), reference.logits(tokens), atol=ATOL, rtol=0)


def test_the_reference_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """transformers reads the head of GLM-4.5 as layer 46, that of a published model."""
    reference = write_with_head(tmp_path, "glm4_moe", num_hidden_layers=46)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    head = MtpModel.from_pretrained(theirs)
    tokens = some_tokens(20, seed=3)
    with torch.inference_mode():
        states = head.forward_layer(
            0,
            reference.model_hidden(tokens)[None, :-1],
            torch.arange(1, len(tokens))[None],
            MtpCache(config=theirs.config.get_mtp_config()),
            input_ids=torch.tensor([tokens[1:]]),
        )
        logits = theirs.lm_head(states)[0]
    torch.testing.assert_close(reference.logits(tokens), logits, atol=ATOL, rtol=0)


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SCHEDULES: dict[str, dict[str, Any]] = {
    "at once": {},
    "without prefix cache": {"prefix_cache": False},
    "in chunks": {"token_budget": 12},
    "preempted": {"num_blocks": 40, "max_slots": 4, "token_budget": 24},
    "two steps ahead": {"steps_in_flight": 2, "max_slots": 4},
}


def replica_with(loaded: LoadedModel, head: LoadedHead | None, **options: Any) -> Replica:
    kind = "none" if head is None else "mtp"
    return Replica(
        loaded, head=head, block_tokens=BLOCK_TOKENS, options={"speculation": kind}, **options
    )


def answers_of(replica: Replica, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return three answers to each prompt, computed together: two with different seeds, as those of
    `n` = 2, and the likeliest."""
    each = [replace(GREEDY, temperature=0.8, seed=seed) for seed in (1, 2)]
    numbers = [replica.add(prompt, params) for prompt in prompts for params in (*each, GREEDY)]
    replica.run()
    return [replica.tokens(number) for number in numbers]


Guessing = tuple[ReferenceHead, LoadedModel, LoadedHead]


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "qwen3_5_text"])
def guessing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guessing:
    """Return a model with few tokens and a random head."""
    path = tmp_path_factory.mktemp("guessing")
    reference = write_with_head(path, request.param, vocab_size=FEW)
    loaded = load(path)
    return reference, loaded, load_own_head(path, loaded)


def some_prompts() -> list[list[int]]:
    prompts = [some_tokens(9 + 7 * seed, seed, FEW) for seed in range(4)]
    return [*prompts, prompts[3] + some_tokens(5, 9, FEW)]


@pytest.fixture(scope="module")
def plain_answers(guessing: Guessing) -> list[list[int]]:
    """Return the answers without drafts. They depend on no schedule."""
    return answers_of(replica_with(guessing[1], None), some_prompts())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_answers_with_drafts_of_a_random_head_are_those_without(
    guessing: Guessing, plain_answers: list[list[int]], schedule: str
) -> None:
    _, loaded, head = guessing
    fast = replica_with(loaded, head, **SCHEDULES[schedule])
    assert answers_of(fast, some_prompts()) == plain_answers
    stats = fast.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (schedule == "preempted")


def check_step(reference: ReferenceHead, replica: Replica, executed: Executed) -> int:
    """Check the proposals of a step of the replica. Return their number."""
    slots = replica.runner.components.slots
    return check_proposals(reference, slots, executed.plan, executed.result)


@pytest.mark.parametrize("schedule", ["without prefix cache", "in chunks", "preempted"])
def test_each_proposal_is_that_of_the_reference_for_the_whole_text(
    guessing: Guessing, schedule: str
) -> None:
    """So all earlier entries were right, whatever steps had computed them, with drafts that were
    right or wrong."""
    reference, loaded, head = guessing
    options = SCHEDULES[schedule] | {"prefix_cache": False}
    replica = replica_with(loaded, head, **options)
    for prompt in some_prompts():
        replica.add(prompt, GREEDY)
    count = 0
    while replica.step():
        if replica.steps[-1].result.proposed is not None:
            count += check_step(reference, replica, replica.steps[-1])
    assert count > 40
    assert (replica.engine.stats().num_preemptions > 0) == (schedule == "preempted")


def test_entries_that_are_computed_late_are_those_of_the_reference(guessing: Guessing) -> None:
    """With many rows, no drafts are worth their cost, and the head computes nothing. Once most
    requests have ended, it computes what it lacks."""
    reference, loaded, head = guessing
    replica = Replica(
        loaded,
        head=head,
        block_tokens=BLOCK_TOKENS,
        prefix_cache=False,
        options={"speculation": "mtp", "draft_width": 2},
    )
    for number in range(12):
        length = 60 if number < 2 else MAX_HEAD_LAG - 4
        prompt = some_tokens(5 + number, number, FEW)
        replica.add(prompt, replace(GREEDY, max_tokens=length))
    count = num_late = num_plain = 0
    while replica.step():
        executed = replica.steps[-1]
        starts, row_starts = executed.plan.follow_starts, executed.plan.row_starts
        if starts is None:
            num_plain += len(row_starts) > 10
        else:
            pairs = zip(starts.tolist(), row_starts.tolist(), strict=True)
            num_late += sum(0 <= start < row_start for start, row_start in pairs)
        if executed.result.proposed is not None:
            count += check_step(reference, replica, executed)
    assert num_plain > 8
    assert num_late > 0
    assert count > 0


@pytest.mark.parametrize("name", ["fp8 blocks", "packed 4 bits"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_a_quantised_head_has_the_numbers_of_the_dense_one(
    tmp_path: Path, model_type: str, name: str
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    write_with_head(plain, model_type, vocab_size=FEW, hidden_size=192)
    proposed: list[list[list[int]]] = []
    for path in quantized_copies(plain, tmp_path, FORMATS[name]):
        loaded = load(path)
        replica = replica_with(loaded, load_own_head(path, loaded))
        replica.answers(some_prompts(), GREEDY)
        results = [step.result.proposed for step in replica.steps]
        proposed.append([each.tolist() for each in results if each is not None])
    assert proposed[0] == proposed[1]
    assert sum(map(len, proposed[0])) > 40


def written_twice(
    path: Path, model_type: str, hidden: int = 96, **options: Any
) -> tuple[Path, Path]:
    """Write a model with few tokens and a random head as safetensors and as a GGUF file, the latter
    with `options` of `write_gguf`."""
    changes: dict[str, Any] = dict(SPARSE_NEMOTRON) if model_type == "nemotron_h" else {}
    changes |= {"vocab_size": FEW, "hidden_size": hidden}
    theirs = write_with_head(path / "model", model_type, **changes).theirs
    return path / "model", write_gguf_with_head(
        path / "model.gguf", path / "model", theirs, tokenizer=few_tokens, **options
    )


def few_tokens(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "c", "d", "e"])
    writer.add_token_types([1] * FEW)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_in_a_gguf_file_proposes_what_it_proposes_in_safetensors(
    tmp_path: Path, model_type: str
) -> None:
    proposed: list[list[list[int]]] = []
    for path in written_twice(tmp_path, model_type):
        loaded = load(path)
        replica = replica_with(loaded, load_own_head(path, loaded))
        replica.answers(some_prompts(), GREEDY)
        results = [step.result.proposed for step in replica.steps]
        proposed.append([each.tolist() for each in results if each is not None])
    assert proposed[0] == proposed[1]
    assert sum(map(len, proposed[0])) > 20


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_a_head_stays_packed_as_in_a_gguf_file(
    tmp_path: Path, model_type: str, kind: GGMLQuantizationType
) -> None:
    plain = GGMLQuantizationType.F32
    wide = ("eh_proj.weight", "ffn_gate.weight", "ffn_up.weight", "attn_q.weight")
    _, path = written_twice(
        tmp_path, model_type, 192, kind=lambda name: kind if name.endswith(wide) else plain
    )
    loaded = load(path, kernels=native_kernels(), weights="packed")
    head = load_own_head(path, loaded)
    columns = head.spec.hidden * 2 * head.spec.hidden
    assert sum(each.nbytes for each in head.model.weights.projection.tensors()) < 1.2 * columns
    without, fast = (replica_with(loaded, each) for each in (None, head))
    assert answers_of(fast, some_prompts()) == answers_of(without, some_prompts())
    assert fast.engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_that_is_always_right_saves_steps(tmp_path: Path, model_type: str) -> None:
    write_with_head(tmp_path, model_type, is_right=True)
    loaded = load(tmp_path)
    plain, fast = (replica_with(loaded, each) for each in (None, load_own_head(tmp_path, loaded)))
    prompts = [some_tokens(7, seed=1)]
    params = replace(GREEDY, max_tokens=91)
    assert fast.answers(prompts, params) == plain.answers(prompts, params)
    stats = fast.engine.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 70
    assert plain.engine.stats().num_steps == 91
    assert stats.num_steps < 15


@pytest.mark.parametrize("is_right", [False, True], ids=["guessing", "right"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_no_random_schedule_changes_an_answer(
    tmp_path: Path, model_type: str, is_right: bool
) -> None:
    """`python -m tests.torture.draft_heads` runs ten thousand of them."""
    model = DraftedModel.of(tmp_path, model_type, is_right=is_right)
    schedules = [HeadSchedule(model, seed) for seed in range(examples(8, 100))]
    for schedule in schedules:
        schedule.run()
    assert sum(schedule.accepted for schedule in schedules) > 0
    assert sum(schedule.preempted for schedule in schedules) > 0
    assert sum(schedule.replaced for schedule in schedules) > 0
