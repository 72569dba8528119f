"""Findings on a machine and an installation: a verdict, with a remedy for each problem."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from protocol.process.devices import DeviceHolder
from protocol.process.packages import HOME, ROOMS, PackageProblem, check_rooms
from protocol.tools.start_facts import GIB, CudaDriver, GpuFacts, MachineFacts, ModelPlan, Preflight
from tools import doctor_findings as findings
from tools.doctor_findings import Finding, Verdict

PLAN = ModelPlan(
    name="small",
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="bfloat16",
    context_tokens=8192,
    max_len=8192,
    weights_bytes=2 * GIB,
    kv_bytes=GIB,
    longest_kv_bytes=GIB,
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


def test_a_complete_machine_has_no_findings() -> None:
    passed = [
        findings.python((3, 11, 7)),
        *findings.libraries({"engine": {"llguidance": "1.9.0"}}),
        findings.processor(FACTS),
        findings.threads(FACTS),
        findings.compute(FACTS),
        findings.device(GPU, []),
        findings.memory(FACTS),
        *findings.model(Preflight(plans=[PLAN])),
        findings.port(8000, None, None),
        findings.sockets(Path("/run/x"), None),
        findings.open_files(1 << 20),
        findings.cache(Path("/cache"), 50 * GIB, None),
        findings.environment([]),
    ]
    assert findings.worst(passed) is Verdict.OK
    assert not any(finding.remedy for finding in passed)
    assert all(finding.fact for finding in passed)


@pytest.mark.parametrize(
    ("finding", "verdict", "fact", "remedy"),
    [
        (findings.python((3, 10, 1)), Verdict.BAD, "3.10.1", "3.11"),
        (
            findings.libraries({"worker": {"torch": None, "numpy": "2.4"}})[0],
            Verdict.BAD,
            "not installed: torch",
            "[worker]",
        ),
        (findings.processor(machine(cpu_flags=["avx2"])), Verdict.DOUBT, "avx2", "bfloat16"),
        (findings.processor(machine(cpu_flags=[], cpu="")), Verdict.DOUBT, "unknown", "slow"),
        (
            findings.environment(["OMP_NUM_THREADS", "WEB_CONCURRENCY"]),
            Verdict.DOUBT,
            "ignored: OMP_NUM_THREADS, WEB_CONCURRENCY",
            "use options instead",
        ),
        (
            findings.threads(machine(quota=0.5, threads=1)),
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
            planned(max_len=4096, longest_kv_bytes=2 * GIB)[1],
            Verdict.DOUBT,
            "requests of up to 4,096 of 8,192 tokens",
            "--kv-memory-gib 2.02",
        ),
        (
            planned(max_len=4096, longest_kv_bytes=2 * GIB, free_bytes=4 * GIB)[1],
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
    ids=lambda value: value.subject if isinstance(value, Finding) else None,
)
def test_every_bad_finding_has_a_remedy(
    finding: Finding, verdict: Verdict, fact: str, remedy: str
) -> None:
    assert finding.verdict is verdict
    assert fact in finding.fact
    assert remedy in finding.remedy


def test_types_that_are_expanded_are_named() -> None:
    assert "(bfloat16, Q4_K is expanded)" in planned(expanded=["Q4_K"])[1].fact


H100 = GpuFacts(name="NVIDIA H100", capability=(9, 0), total_bytes=80 * GIB, free_bytes=GIB)
DRIVER = CudaDriver(version="580.95.05", cuda=(13, 0), gpus=[H100, replace(H100, free_bytes=0)])
WITH_GPUS = {
    "torch_build": "CUDA 13.0",
    "driver": DRIVER,
    "triton": "3.6.0",
    "c_compiler": "/usr/bin/gcc",
}


def test_each_gpu_its_driver_and_its_libraries_have_a_line() -> None:
    libraries = ["FlashAttention 3 (vllm 0.33.0)"]
    found = findings.gpus(machine(**WITH_GPUS, attention=libraries))
    assert [(each.subject, each.fact) for each in found] == [
        ("gpu", "cuda:0: NVIDIA H100, compute capability 9.0, 1.00 GiB of 80.00 GiB free"),
        ("gpu", "cuda:1: NVIDIA H100, compute capability 9.0, 0.00 GiB of 80.00 GiB free"),
        ("driver", "580.95.05, up to CUDA 13.0"),
        ("gpu code", "triton 3.6.0; FlashAttention 3 (vllm 0.33.0)"),
    ]
    assert findings.worst(found) is Verdict.OK


def test_a_machine_without_a_gpu_is_well_and_says_why_there_is_none() -> None:
    driver = CudaDriver(problem="NVIDIA's driver is not installed", remedy="install it")
    assert findings.gpus(machine(driver=driver)) == [
        Finding("gpu", "none: NVIDIA's driver is not installed")
    ]


def test_a_gpu_that_torch_cannot_use_is_a_doubt() -> None:
    problem = {"gpu_problem": "torch is a build for CPUs", "gpu_remedy": "install the other"}
    *_, driver, libraries = findings.gpus(machine(driver=DRIVER, **problem))
    assert driver == Finding(
        "driver",
        "580.95.05, up to CUDA 13.0; not used, because torch is a build for CPUs",
        Verdict.DOUBT,
        "install the other",
    )
    assert (libraries.verdict, libraries.fact) == (
        Verdict.DOUBT,
        "no triton; no FlashAttention library",
    )
    assert "[cuda]" in libraries.remedy


def test_a_triton_without_a_c_compiler_is_a_doubt() -> None:
    found = findings.gpus(machine(**WITH_GPUS | {"c_compiler": ""}))[-1]
    assert (found.verdict, found.fact) == (
        Verdict.DOUBT,
        "triton 3.6.0, no C compiler; no FlashAttention library",
    )
    assert "gcc" in found.remedy


def test_amds_gpus_are_left_to_torch() -> None:
    assert findings.gpus(machine(torch_build="HIP 6.4")) == []
    assert findings.compute(machine(torch_build="HIP 6.4")).fact.startswith("torch 2.13.0 for HIP")


def test_a_gpu_needs_no_fast_cpu() -> None:
    assert findings.processor(machine(device="cuda:0", cpu_flags=[])).verdict is Verdict.OK


def test_our_own_server_on_the_port_is_no_problem() -> None:
    finding = findings.port(8000, "in use", 12)
    assert finding.verdict is Verdict.OK
    assert "pid 12" in finding.fact


def test_the_worst_verdict_counts() -> None:
    ok, doubt, bad = (Finding("x", "y", verdict) for verdict in Verdict)
    assert findings.worst([ok, bad, doubt]) is Verdict.BAD
    assert findings.worst([doubt, ok]) is Verdict.DOUBT
    assert findings.worst([]) is Verdict.OK


# ---- packages that are mixed into ours
FILES = {f"{room}/__init__.py": f'"""Our {room}."""\n' for room in ROOMS}
FILES |= {"tools/__main__.py": "print('it runs')\n\ndef main():\n    return 0\n"}
OTHERS = {"tools/__init__.py": "raise RuntimeError('not ours')\n", "tools/hammer.py": "\n"}
RUN = "import sys, tidegate; sys.exit(tidegate.main())"


def install(site: Path, name: str, files: Mapping[str, str]) -> None:
    """Write the files of a package and its RECORD, as an installer does. Existing files are
    overwritten."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info = site / f"{name}.dist-info"
    info.mkdir()
    rows = [f"{path},sha256=x,{len(text.encode())}" for path, text in files.items()]
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages that contains a small Tidegate."""
    site = tmp_path / "site"
    modules = ("__init__", "packages", "installation")
    files = (*(f"protocol/process/{module}.py" for module in modules), "tidegate.py")
    own = {name: (HOME / name).read_text() for name in files}
    install(site, "tidegate-0.1.0", FILES | own)
    return site


def tidegate(site: Path) -> subprocess.CompletedProcess[str]:
    """Run the `tidegate` command that is installed in `site`."""
    code = f"import sys; sys.path[:0] = [{str(site)!r}]; {RUN}"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)


def uninstall(site: Path, name: str, files: Mapping[str, str]) -> None:
    for path in files:
        (site / path).unlink()
    shutil.rmtree(site / f"{name}.dist-info")


def test_this_installation_is_whole() -> None:
    assert check_rooms() == check_rooms(thorough=True) == []
    assert findings.packages([]).verdict is Verdict.OK


def test_an_installation_alone_is_whole(site: Path) -> None:
    done = tidegate(site)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it runs\n", "")


def test_a_package_that_replaces_a_file_of_ours_is_named_before_it_is_imported(site: Path) -> None:
    install(site, "tools-9.1", OTHERS)
    done = tidegate(site)
    assert done.returncode == 1
    replaced, foreign = done.stderr.splitlines()
    assert replaced.startswith("tidegate: tools/__init__.py was replaced by tools 9.1; reinstall")
    assert foreign.startswith("tidegate: tools/hammer.py belongs to tools 9.1; removing that may")
    assert "environment of its own: pipx install" in replaced


def test_a_package_damaged_by_a_removal_is_named(site: Path) -> None:
    install(site, "tools-9.1", OTHERS)
    uninstall(site, "tools-9.1", OTHERS)
    done = tidegate(site)
    assert done.returncode == 1
    assert done.stderr.startswith("tidegate: the package tools has no __init__.py: a part of")


def test_added_files_do_not_prevent_the_start(site: Path) -> None:
    install(site, "worker-2.0", {"worker/strange.py": ""})
    done = tidegate(site)
    assert (done.returncode, done.stdout) == (0, "it runs\n")
    assert "worker/strange.py belongs to worker 2.0" in done.stderr


def test_a_package_that_is_found_before_ours_is_named(site: Path, tmp_path: Path) -> None:
    install(tmp_path / "first", "gateway-3.0", {"gateway/__init__.py": ""})
    path = [str(tmp_path / "first"), str(site)]
    code = f"import sys; sys.path[:0] = {path!r}; {RUN}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    message = f"the package gateway is {tmp_path / 'first' / 'gateway'} of gateway 3.0, which hides"
    assert message in done.stderr


EDITABLE = """
from importlib.machinery import PathFinder

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{site!r}]) if path is None else None

sys.meta_path.append(Editable)
"""
"""Code that makes Python find packages in `site` after all folders of sys.path, as an editable
install of setuptools does."""


@pytest.mark.parametrize("file", ["gateway/routes.py", "gateway.py"])
def test_a_folder_or_a_module_that_hides_an_editable_install_is_named(
    site: Path, tmp_path: Path, file: str
) -> None:
    first = tmp_path / "first"
    install(first, "gateway-3.0", {file: ""})
    code = f"import sys; sys.path.insert(0, {str(first)!r})\n{EDITABLE.format(site=str(site))}\n"
    command = [sys.executable, "-I", "-S", "-c", code + RUN]
    done = subprocess.run(command, capture_output=True, text=True)
    found = first / file.removesuffix("/routes.py")
    assert done.returncode == 1
    assert f"the package gateway is {found} of gateway 3.0, which hides" in done.stderr
    assert f"in {site / 'gateway'}" in done.stderr


def problems_of(site: Path, *, thorough: bool = False) -> list[PackageProblem]:
    """Return the problems that a program installed in `site` finds."""
    code = (
        f"import json, sys; sys.path[:0] = [{str(site)!r}];"
        "from protocol.process.packages import check_rooms;"
        f"found = check_rooms(thorough={thorough});"
        "print(json.dumps([[problem.message, problem.is_fatal] for problem in found]))"
    )
    told = subprocess.check_output([sys.executable, "-I", "-c", code], text=True)
    return [PackageProblem(message, is_fatal) for message, is_fatal in json.loads(told)]


def test_an_edited_file_is_reported_by_the_doctor_alone(site: Path) -> None:
    with (site / "protocol/process/packages.py").open("a") as file:
        file.write("# mine\n")
    assert problems_of(site) == []
    (problem,) = problems_of(site, thorough=True)
    message = "protocol/process/packages.py was changed after the installation"
    assert problem == PackageProblem(message, is_fatal=False)
    assert findings.packages([problem]).verdict is Verdict.DOUBT


def test_a_file_that_is_gone_is_fatal(site: Path) -> None:
    (site / "tools/__main__.py").unlink()
    problems = problems_of(site)
    assert problems == [PackageProblem(f"tools/__main__.py is missing from {site}")]
    assert findings.packages(problems).verdict is Verdict.BAD


STATES = {
    "state_bytes": GIB >> 3,
    "request_state_bytes": 3 << 19,
    "max_slots": 64,
    "num_checkpoints": 21,
}


def test_a_model_of_the_catalogue_is_compared_with_the_memory_before_its_download() -> None:
    fits = findings.undownloaded("big", 8 * GIB, machine(free_bytes=8 * GIB))
    assert fits.verdict is Verdict.OK
    assert fits.fact.endswith("It needs about 8.0 GiB of memory")
    large = findings.undownloaded("big", 8 * GIB, machine(free_bytes=2 * GIB))
    assert large.verdict is Verdict.DOUBT
    assert large.fact.endswith("It needs about 8.0 GiB of memory, and 2.0 GiB are free")
    assert large.remedy == "choose a smaller one: tidegate models"


def test_memory_for_recurrent_states_is_named() -> None:
    _, memory, states = planned(**STATES)
    assert "0.25 GiB for working memory (0.12 GiB of it for recurrent states)" in memory.fact
    fact = "1.5 MiB for each of 64 requests and 21 checkpoints of the prefix cache"
    assert states == Finding("states", fact)
    _, memory = planned()
    assert "recurrent" not in memory.fact


def test_fewer_requests_at_a_time_and_missing_checkpoints_are_named() -> None:
    *_, fewer = planned(**STATES | {"max_slots": 5})
    assert "1.5 MiB for each of 5 requests at a time (more with --max-slots) and 21" in fewer.fact
    assert fewer.verdict is Verdict.OK
    *_, none = planned(**STATES | {"num_checkpoints": 0})
    assert none.verdict is Verdict.DOUBT
    assert none.fact.endswith("64 requests and 0 checkpoints of the prefix cache")
    assert "each prompt is computed" in none.remedy
    *_, own_cache = planned(**STATES | {"num_checkpoints": None})
    assert own_cache == Finding("states", "1.5 MiB for each of 64 requests; no prefix cache")
