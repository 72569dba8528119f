"""`tidegate pull`, `serve`, `models`, `doctor` and `rm` with a model on a fake hub. The environment
variables of huggingface_hub point to the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.fake_hub import TOKEN, FakeHub, FakeRepo, gguf_start
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.server import START_TIMEOUT_S
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_llama(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with FakeHub() as hub:
        hub.repos["tide/tiny"] = FakeRepo(files)
        hub.repos["tide/gated"] = FakeRepo(files, is_gated=True)
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "TIDEGATE_HOME": str(tmp_path / "home"),
    }


def tidegate(environment: Mapping[str, str], *words: str) -> tuple[int, str, str]:
    """Run a command, and return its exit code, its output, and the last line of its errors."""
    with Program(["-P", "-m", "tools", *words], environment=environment) as program:
        code = program.end(timeout_s=120)
    return code, "\n".join(program.out), (program.err or [""])[-1]


def test_a_model_is_pulled_served_without_a_network_listed_and_removed(
    hub: FakeHub, environment: dict[str, str]
) -> None:
    code, path, _ = tidegate(environment, "pull", "tide/tiny")
    assert code == 0
    assert sorted(file.name for file in Path(path).iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    hub.requests.clear()

    serve = ["-P", "-m", "tools", "serve", "tide/tiny", "--port", str(free_port())]
    with Program(serve, environment=environment) as server:
        server.line_with("Tidegate serves tide/tiny at", timeout_s=START_TIMEOUT_S)
        assert eventually(lambda: any("model tiny dtype=" in line for line in server.err))
    assert hub.requests == []

    code, out, _ = tidegate(environment, "models", "--json")
    (listed,) = json.loads(out)
    assert (code, listed["name"], listed["path"]) == (0, "tide/tiny", path)
    assert (listed["error"], listed["max_len"] > 0, listed["weights_bytes"] > 0) == ("", True, True)
    assert "model       tiny" in tidegate(environment, "doctor", "tide/tiny")[1]

    assert tidegate(environment, "rm", "tide/tiny")[0] == 0
    assert not Path(path).exists()
    assert json.loads(tidegate(environment, "models", "--json")[1]) == []


def test_refusals_are_one_line_with_a_remedy(environment: dict[str, str]) -> None:
    code, _, line = tidegate(environment, "serve", "tide/none", "--port", str(free_port()))
    assert code == ExitCode.NO_DOWNLOAD
    assert line.startswith("tidegate: no model tide/none at http://127.0.0.1:")
    code, _, line = tidegate(environment, "pull", "tide/gated")
    assert code == ExitCode.NO_DOWNLOAD
    assert "accept them at" in line
    code, _, line = tidegate({**environment, "HF_HUB_OFFLINE": "1"}, "pull", "tide/tiny")
    assert code == ExitCode.NO_DOWNLOAD
    assert "$HF_HUB_OFFLINE forbids a download; unset it" in line
    code, _, line = tidegate(environment, "rm", "tide/tiny")
    assert code == ExitCode.BAD_MODEL
    assert line == "tidegate: tide/tiny is not in the cache; see: tidegate models"


def test_the_token_of_the_environment_opens_a_repository_with_terms(
    environment: dict[str, str],
) -> None:
    code, path, _ = tidegate({**environment, "HF_TOKEN": TOKEN}, "pull", "tide/gated")
    assert code == 0
    assert (Path(path) / "config.json").is_file()


def test_a_pull_that_is_killed_is_continued(hub: FakeHub, environment: dict[str, str]) -> None:
    content = gguf_start("llama") + bytes(1000) * 3000
    hub.repos["tide/gguf"] = FakeRepo({"m-Q4_0.gguf": content})
    hub.stalls_after = 2_000_000
    command = ["-P", "-m", "tools", "pull", "tide/gguf:Q4_0"]
    with Program(command, environment=environment) as program:
        assert eventually(
            lambda: any(": 1." in line and "of 3.0 MB" in line for line in program.err),
            within_s=60,
        )
    hub.stalls_after = None
    hub.requests.clear()
    code, path, _ = tidegate(environment, "pull", "tide/gguf:Q4_0")
    assert (code, Path(path).read_bytes()) == (0, content)
    ((first, *_),) = [hub.ranges(".gguf")]
    assert first.startswith("bytes=")


def test_a_command_about_models_does_not_load_the_library_of_the_hub() -> None:
    code = (
        "import sys; from tools.commands.models import resolve; import tools.models.stored; "
        "print('huggingface_hub' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr
