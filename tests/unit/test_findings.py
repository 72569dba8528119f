"""What is said of a machine: a verdict for each fact, and a remedy wherever not all is well."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from protocol.devices import DeviceHolder
from protocol.facts import MachineFacts
from protocol.preflight import GIB, ModelPlan, Preflight
from tools import findings
from tools.findings import Finding, Verdict

PLAN = ModelPlan(
    name="small",
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="bfloat16",
    context_tokens=8192,
    max_len=8192,
    weights_bytes=2 * GIB,
    kv_bytes=GIB,
    work_bytes=GIB >> 2,
    free_bytes=16 * GIB,
)
FACTS = MachineFacts(
    torch="2.13.0",
    device="cpu",
    dtype="bfloat16",
    cpu="A CPU",
    cpu_flags=["avx2", "avx512_bf16"],
    cores=8,
    threads=8,
    free_bytes=16 * GIB,
)


def machine(**changes: object) -> MachineFacts:
    return msgspec.structs.replace(FACTS, **changes)


def planned(**changes: object) -> list[Finding]:
    return findings.model(Preflight(plans=[replace(PLAN, **changes)]))


GPU = machine(device="cuda:0", device_id="gpu-0a1b")
HOLDER = DeviceHolder(pid=7, place="8000", model="small", since=1.7e9)


def test_a_machine_that_has_all_is_well() -> None:
    said = [
        findings.python((3, 11, 7)),
        *findings.libraries({"engine": {"llguidance": "1.9.0"}}),
        findings.processor(FACTS),
        findings.threads(FACTS, {}),
        findings.compute(FACTS),
        findings.device(GPU, []),
        findings.memory(FACTS),
        *findings.model(Preflight(plans=[PLAN])),
        findings.port(8000, None, None),
        findings.sockets(Path("/run/x"), None),
        findings.open_files(1 << 20),
        findings.cache(Path("/cache"), 50 * GIB, None),
    ]
    assert findings.worst(said) is Verdict.OK
    assert not any(finding.remedy for finding in said)
    assert all(finding.said for finding in said)


@pytest.mark.parametrize(
    ("finding", "verdict", "said", "remedy"),
    [
        (findings.python((3, 10, 1)), Verdict.BAD, "3.10.1", "3.11"),
        (
            findings.libraries({"worker": {"torch": None, "numpy": "2.4"}})[0],
            Verdict.BAD,
            "not installed: torch",
            "tidegate[worker]",
        ),
        (findings.processor(machine(cpu_flags=["avx2"])), Verdict.DOUBT, "avx2", "bfloat16"),
        (findings.processor(machine(cpu_flags=[], cpu="")), Verdict.DOUBT, "unknown", "slow"),
        (
            findings.threads(FACTS, {"OMP_NUM_THREADS": "1", "HOME": "/"}),
            Verdict.DOUBT,
            "OMP_NUM_THREADS=1",
            "unset OMP_NUM_THREADS",
        ),
        (
            findings.threads(machine(quota=0.5, threads=1), {}),
            Verdict.DOUBT,
            "1 of 8 cores (this container may use 0.5)",
            "at least one core",
        ),
        (
            findings.model(Preflight(error="1.00 GiB are free", remedy="less", is_memory=True))[0],
            Verdict.BAD,
            "1.00 GiB are free",
            "less",
        ),
        (
            findings.model(Preflight(error="it is a pickle", remedy="convert it"))[0],
            Verdict.BAD,
            "it is a pickle",
            "convert it",
        ),
        (
            planned(window=4096)[0],
            Verdict.DOUBT,
            "with an attention window of 4,096 tokens",
            "requests are limited to the window",
        ),
        (
            planned(max_len=4096)[1],
            Verdict.DOUBT,
            "requests of up to 4,096 of 8,192 tokens",
            "--kv-memory-gib 2.02",
        ),
        (
            planned(max_len=4096, free_bytes=4 * GIB)[1],
            Verdict.DOUBT,
            "4.00 GiB free; 2.00 GiB for weights (bfloat16), 1.00 GiB for K/V, "
            "0.25 GiB for working memory",
            "--max-len 4096",
        ),
        (findings.device(GPU, [HOLDER]), Verdict.BAD, "by pid 7 (small on port 8000", "cuda:N"),
        (
            findings.device(GPU, [replace(HOLDER, shares=True)]),
            Verdict.DOUBT,
            "UTC, shared)",
            "share it (--share-device)",
        ),
        (findings.port(80, "in use by pid 7", None), Verdict.BAD, "pid 7", "--port"),
        (findings.sockets(Path("/x"), "too long"), Verdict.BAD, "too long", "XDG_RUNTIME_DIR"),
        (findings.open_files(1024), Verdict.DOUBT, "1,024", "ulimit"),
        (findings.cache(Path("/c"), None, "read-only"), Verdict.BAD, "read-only", "TIDEGATE_HOME"),
        (findings.cache(Path("/c"), 1 << 20, None), Verdict.DOUBT, "0.0 GiB", "free some space"),
    ],
    ids=lambda value: value.what if isinstance(value, Finding) else None,
)
def test_what_is_not_well_has_a_remedy(
    finding: Finding, verdict: Verdict, said: str, remedy: str
) -> None:
    assert finding.verdict is verdict
    assert said in finding.said
    assert remedy in finding.remedy


def test_types_that_are_expanded_are_named() -> None:
    assert "(bfloat16, Q4_K is expanded)" in planned(expanded=["Q4_K"])[1].said


def test_a_gpu_needs_no_fast_cpu() -> None:
    assert findings.processor(machine(device="cuda:0", cpu_flags=[])).verdict is Verdict.OK


def test_a_server_of_ours_on_the_port_is_no_fault() -> None:
    finding = findings.port(8000, "in use", 12)
    assert finding.verdict is Verdict.OK
    assert "pid 12" in finding.said


def test_the_worst_verdict_counts() -> None:
    ok, doubt, bad = (Finding("x", "y", verdict) for verdict in Verdict)
    assert findings.worst([ok, bad, doubt]) is Verdict.BAD
    assert findings.worst([doubt, ok]) is Verdict.DOUBT
    assert findings.worst([]) is Verdict.OK
