"""The names of models, the check of cached files, and the progress of a download."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.engine.model_card import SamplingDefaults
from protocol.tools.start_facts import MemoryFacts, ModelPlan
from tools.commands.models import hub_lines, resolve
from tools.failure import Failure
from tools.models.catalogue import (
    CATALOGUE,
    DEFAULT,
    HUB_MODELS,
    Entry,
    HubEntry,
    catalogue_digest,
    catalogue_entries,
    recommended_for,
)
from tools.models.fetch import (
    ProgressLines,
    cached_file,
    fetch,
    format_size,
    home,
    is_cached,
    largest_file,
    print_on_stderr,
    progress_bar,
    recommended_sampling,
)
from tools.models.preflight import log_larger
from tools.models.pulling import parse_name
from tools.terminal import Terminal

CONTENT = b"GGUF and some weights"
SMALL = dataclasses.replace(
    CATALOGUE[DEFAULT],
    name="small",
    file_bytes=len(CONTENT),
    file_sha256=hashlib.sha256(CONTENT).hexdigest(),
)
QUANTISED = [entry for entry in HUB_MODELS.values() if ":" in entry.source]


def cached(entry: Entry, cache: Path) -> Path:
    """Store the file of `entry` in `cache`, verified as after a fetch. Return its path."""
    file = cached_file(entry, cache)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert fetch(entry, cache) == file
    return file


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_every_catalogue_entry_has_digests(entry: Entry) -> None:
    for digest in (entry.wheel_sha256, entry.file_sha256):
        assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size
    assert CATALOGUE[entry.name] is entry
    assert entry.file.endswith(".gguf")
    assert entry.licence


def test_a_file_of_the_catalogue_has_the_same_sampling_by_its_name_and_by_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "small", SMALL)
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    same.write_bytes(CONTENT)
    other.write_bytes(CONTENT[::-1])
    assert recommended_sampling("small", tmp_path / "any") == SMALL.sampling
    assert recommended_sampling(str(same), same) == SMALL.sampling
    for file in (other, tmp_path / "none.gguf", tmp_path):
        assert recommended_sampling(str(file), file) == SamplingDefaults()


@pytest.mark.parametrize("entry", HUB_MODELS.values(), ids=lambda entry: entry.name)
def test_every_model_on_the_hub_has_a_name_that_can_be_pulled(entry: HubEntry) -> None:
    assert HUB_MODELS[entry.name] is entry
    name = parse_name(entry.name)
    assert str(name) == entry.source
    assert entry.name not in CATALOGUE
    assert entry.licence
    assert entry.weight_bytes > entry.parameters / 3 > 0
    assert entry.context_tokens > 0


@pytest.mark.parametrize(
    "entry",
    [each for each in HUB_MODELS.values() if ":" in each.source],
    ids=lambda each: each.name,
)
def test_a_quantised_model_of_the_catalogue_is_one_file_with_a_known_digest(
    entry: HubEntry,
) -> None:
    assert len(bytes.fromhex(entry.file_sha256)) == hashlib.sha256().digest_size
    assert catalogue_digest(entry.source) == entry.file_sha256
    assert catalogue_digest(entry.source.partition(":")[0]) == ""
    assert 0 < entry.file_bytes <= 1.2 * entry.parameters
    assert entry.form in entry.source.upper()
    assert 0 < entry.token_bytes <= entry.weight_bytes


@pytest.mark.parametrize("entry", HUB_MODELS.values(), ids=lambda entry: entry.name)
def test_the_shown_parts_of_the_needed_memory_sum_up_to_the_shown_total(entry: HubEntry) -> None:
    def shown(size: float) -> float:
        """Return the GB that a user reads."""
        return round(size / 1e9, 1)

    assert f"{format_size(entry.rest_bytes)} for K/V" in " ".join(hub_lines(entry, None))
    parts = shown(entry.weight_bytes) + shown(entry.rest_bytes)
    assert shown(entry.needed_bytes) == pytest.approx(parts)


def test_the_lines_of_a_model_say_how_fast_it_can_be_or_that_it_is_too_large() -> None:
    entry = HUB_MODELS["qwen3-30b-a3b"]
    read = 2.0 * entry.token_bytes
    for free, words in ((entry.needed_bytes, "at most 2 tokens/s here"), (10**9, "too large")):
        facts = MemoryFacts(device="cpu", free_bytes=free, read_bytes_per_s=read)
        (line,) = [line for line in hub_lines(entry, facts) if words in line]
        assert line.startswith("needs about 22.3 GB of memory")
    gpu = MemoryFacts(device="cuda:0", free_bytes=10**12, read_bytes_per_s=0)
    assert "tokens/s" not in " ".join(hub_lines(entry, gpu))


def test_a_mixture_of_experts_reads_only_the_experts_of_a_token() -> None:
    whole, experts = HUB_MODELS["qwen3-8b"], HUB_MODELS["qwen3-30b-a3b"]
    assert whole.token_bytes == whole.weight_bytes
    assert experts.weight_bytes > 3 * whole.weight_bytes
    assert experts.max_tokens_per_s(1e10) > 2 * whole.max_tokens_per_s(1e10)


@pytest.mark.parametrize("memory_gb", [0, 1, 4, 16, 64])
def test_the_largest_recommended_model_that_fits_comes_first(memory_gb: int) -> None:
    found = recommended_for(memory_gb * 10**9)
    sizes = [entry.needed_bytes for entry in found]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= memory_gb * 10**9 for size in sizes)
    assert bool(found) == (memory_gb > 1)


@pytest.mark.parametrize(
    ("free_gb", "names"),
    [(1, ""), (3, "qwen3-1.7b (1.8 GB{}) or qwen3.5-0.8b (563 MB{})"), (10, "qwen3-8b (5.0 GB{}")],
)
def test_a_start_with_the_default_model_names_two_better_ones_that_fit(
    free_gb: int, names: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ModelPlan(
        name=DEFAULT,
        architecture="LlamaForCausalLM",
        device="cpu",
        dtype="bfloat16",
        context_tokens=8192,
        max_len=8192,
        weights_bytes=1,
        kv_bytes=1,
        longest_kv_bytes=1,
        work_bytes=1,
        free_bytes=free_gb * 10**9,
    )
    for read_bytes_per_s in (0.0, 1e10):
        facts = MemoryFacts(device="cpu", free_bytes=0, read_bytes_per_s=read_bytes_per_s)
        log_larger(plan, Terminal(), partial(lambda facts: facts, facts))
        out = capfd.readouterr().out
        speeds = re.findall(r", at most ([\d.,]+) tokens/s", out)
        shown = [f", at most {speed} tokens/s" for speed in speeds] or ["", ""]
        assert f"tidegate serve {names.format(*shown)}" in out if names else out == ""
        assert ("upper estimates" in out) == bool(speeds) == bool(names and read_bytes_per_s)
        assert len(speeds) in (0, 2)


def test_clients_see_the_recommended_models_of_the_hub_first() -> None:
    names = [entry.name for entry in catalogue_entries(1e10)]
    best = [entry.is_recommended for entry in catalogue_entries(1e10)]
    assert sorted(names) == sorted([*CATALOGUE, *HUB_MODELS])
    assert best == [False] * len(CATALOGUE) + sorted(best[len(CATALOGUE) :], reverse=True)
    speeds = {entry.name: entry.max_tokens_per_s for entry in catalogue_entries(1e10)}
    assert speeds["qwen3-1.7b"] == pytest.approx(5.45, abs=0.01)
    assert all(each.max_tokens_per_s == 0 for each in catalogue_entries())


def test_the_default_model_is_in_the_catalogue() -> None:
    assert DEFAULT in CATALOGUE


def test_the_environment_sets_the_directory_of_the_cache() -> None:
    assert home({"TIDEGATE_HOME": "/data/tide"}) == Path("/data/tide")
    assert home({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/tidegate")
    assert home({}) == Path.home() / ".cache" / "tidegate"


def test_a_right_file_without_a_stamp_is_hashed_once_and_kept(tmp_path: Path) -> None:
    file = cached_file(SMALL, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert not is_cached(SMALL, tmp_path)
    assert fetch(SMALL, tmp_path) == file
    assert is_cached(SMALL, tmp_path)


def test_a_changed_cached_file_is_not_used(tmp_path: Path) -> None:
    file = cached(SMALL, tmp_path)
    file.write_bytes(CONTENT[::-1])
    assert not is_cached(SMALL, tmp_path)


def test_a_cached_file_of_another_release_is_not_used(tmp_path: Path) -> None:
    cached(SMALL, tmp_path)
    newer = dataclasses.replace(SMALL, file_sha256=hashlib.sha256(b"newer").hexdigest())
    assert not is_cached(newer, tmp_path)


def test_a_local_path_is_a_model_if_it_looks_like_one(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "m.gguf", tmp_path / "hf"
    gguf.write_bytes(CONTENT)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(gguf), tmp_path) == gguf
    assert resolve(str(folder), tmp_path) == folder
    blob = gguf.rename(tmp_path / "sha256-01ab")  # as Ollama names its files
    assert resolve(str(blob), tmp_path) == blob


def test_a_path_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for name, words in (
        ("smollm2-135", DEFAULT),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "notes.txt"), "neither a GGUF file"),
    ):
        with pytest.raises(Failure, match=words):
            resolve(name, tmp_path)


# ---- progress
def test_a_folder_that_vanishes_before_it_is_entered_does_not_end_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = tmp_path / "partial" / "pip-download-x"
    doomed.mkdir(parents=True)
    (doomed / "wheel").write_bytes(bytes(100))
    (tmp_path / "pip.log").write_bytes(bytes(7))

    monkeypatch.setattr(os, "scandir", _removing(doomed, os.scandir))

    assert largest_file(tmp_path) == 7
    assert not doomed.exists()


def test_the_largest_file_is_found_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "partial" / "deep").mkdir(parents=True)
    (tmp_path / "partial" / "deep" / "wheel").write_bytes(bytes(100))
    (tmp_path / "pip.log").write_bytes(bytes(7))

    assert largest_file(tmp_path) == 100


def test_without_a_terminal_progress_is_a_line_for_each_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar(40_000_000, "downloading it", print_on_stderr) as bar:
        for _ in range(8):
            bar.update(5_000_000)
    lines = [f"downloading it: {n} of 40 MB" for n in (0, 10, 20, 30, 40)]
    assert capsys.readouterr().err == "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("total", "shown"), [(8_000_000, ["0.0", "8.0 of 8.0 MB"]), (2_500_000_000, ["0.0 of 2.5 GB"])]
)
def test_small_and_large_sizes_have_one_decimal(total: int, shown: list[str]) -> None:
    lines: list[str] = []
    with ProgressLines(total, "it", lines.append) as bar:
        bar.update(total)
    assert all(any(part in line for line in lines) for part in shown)


def test_progress_is_a_json_line_if_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(40_000_000, "downloading it", Terminal("json").progress):
        pass
    line = msgspec.json.decode(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("INFO", "downloading it: 0 of 40 MB")


@pytest.mark.parametrize(
    ("free", "said"), [(12_000_000, "12 MB"), (300_000, "0.3 MB"), (0, "0.0 MB")]
)
def test_too_little_disk_is_found_before_anything_is_fetched(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    entry = CATALOGUE[DEFAULT]
    with pytest.raises(Failure) as caught:
        fetch(entry, tmp_path)
    folder = tmp_path / "models" / entry.name
    assert str(caught.value).startswith(
        f"not enough space in {folder}: 191 MB needed, {said} free; free some"
    )
    assert [path.name for path in folder.iterdir()] == [".lock"]


def _removing(doomed: Path, scandir: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `scandir` that removes `doomed` just before it lists it, as pip might."""

    def looked(path: Any = ".") -> Any:
        if path in (str(doomed), doomed):
            (doomed / "wheel").unlink()
            doomed.rmdir()
        return scandir(path)

    return looked
