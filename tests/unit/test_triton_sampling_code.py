"""The machine code of the kernels that sample: it is compiled for the launches of a large step, and
uses no memory for spilled registers.

Registers and shared memory are recorded in tests/data/triton_sampling_resources.json, because they
decide how many programs run at once. `python -m tests.unit.test_triton_sampling_code` writes the
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from protocol.engine.sampling import SamplingParams
from tests.support.sampled_rows import RowRequest, bind_rows
from tests.support.triton_code import (
    CAPABILITIES,
    MAX_SHARED_BYTES,
    KernelLaunch,
    recorded_calls,
    triton,
)
from worker.sampling.bans import RowMasks
from worker.sampling.row_split import EXACT
from worker.sampling.triton import logit_stages, sampling, scores
from worker.sampling.triton_sampling import TritonSampling

RECORDED = Path("tests/data/triton_sampling_resources.json")
VOCAB = 151_936
PARAMS = SamplingParams(
    top_k=50,
    top_p=0.9,
    repetition_penalty=1.1,
    logit_bias={1: 1.0},
    logprobs=20,
    logprobs_of="both",
    logprob_token_ids=[3],
)
WITHOUT_FLOATS = {"verify_drafts"}
"""Kernels that compute with integers only."""
UPLOADED = {"bits", "drafts", "drawn_at", "ends", "known", "places", "rows", "slots", "starts"}
"""Arguments that the host uploads for a step."""


@cache
def launches() -> dict[str, KernelLaunch]:
    """Return one launch of each kernel, and of each variant of `add_digits`. They do not run."""
    logits = torch.zeros(2, VOCAB)
    slots, sampled = bind_rows([RowRequest(PARAMS)] * 2)
    masks = RowMasks(torch.tensor([0, 1]), torch.zeros(2, VOCAB // 8, dtype=torch.uint8))
    with ExitStack() as stack:
        calls = [
            stack.enter_context(recorded_calls(module))
            for module in (logit_stages, sampling, scores)
        ]
        drafts = torch.tensor([5, -1]).numpy()
        TritonSampling().sample(logits, slots, sampled, masks=masks, drafts=drafts)
    return {name_of(launch): launch for each in calls for launch in each}


def name_of(launch: KernelLaunch) -> str:
    variant = [launch.arguments[name] for name in ("SEARCH", "DIGIT") if name in launch.arguments]
    return " ".join(map(str, (launch.kernel.__name__, *variant)))


def compiled() -> Iterator[tuple[str, int]]:
    """Yield the names of the kernels that are compiled, each with a capability."""
    for name in sorted(launches()):
        for capability in CAPABILITIES:
            yield name, capability


@pytest.mark.parametrize(("name", "capability"), list(compiled()))
def test_a_kernel_spills_nothing_and_needs_what_is_recorded(name: str, capability: int) -> None:
    found = launches()[name].compile_for(capability)
    assert (found.stack_bytes, found.spill_stores, found.spill_loads) == (0, 0, 0)
    assert found.shared_bytes <= MAX_SHARED_BYTES[capability]
    recorded = json.loads(RECORDED.read_text())
    if recorded["triton"] == triton.__version__:
        needs = {"registers": found.registers, "shared_bytes": found.shared_bytes}
        assert needs == recorded["kernels"][f"{name}, sm_{capability}"]


def test_kernels_that_read_rows_of_logits_load_16_bytes_at_once() -> None:
    for name in ("find_peaks", "add_digits 0 0", "weigh_blocks", "choose_tokens"):
        assert launches()[name].compile_for(90).widest_load_bytes == 16


def test_no_kernel_is_compiled_again_because_of_where_an_upload_lies() -> None:
    """Arrays that are uploaded together lie side by side in one buffer."""
    for launch in launches().values():
        for parameter in launch.kernel.params:
            assert parameter.name not in UPLOADED or parameter.do_not_specialize_on_alignment


def test_no_kernel_is_compiled_again_because_of_the_width_of_the_slots() -> None:
    """When memory is measured, the slots are wider than those that serve."""
    found = [each for launch in launches().values() for each in launch.kernel.params]
    widths = [each for each in found if each.name == "max_len"]
    assert len(widths) == 3
    assert all(each.do_not_specialize for each in widths)


def test_no_product_is_fused_with_a_sum() -> None:
    for name, launch in launches().items():
        if name not in WITHOUT_FLOATS:
            assert EXACT.items() <= launch.arguments.items(), name


if __name__ == "__main__":
    kernels = {}
    for name, capability in compiled():
        found = launches()[name].compile_for(capability)
        kernels[f"{name}, sm_{capability}"] = {
            "registers": found.registers,
            "shared_bytes": found.shared_bytes,
        }
    content = {"triton": triton.__version__, "kernels": kernels}
    RECORDED.write_text(json.dumps(content, indent=1) + "\n")
