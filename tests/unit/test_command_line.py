"""What the command line says to somebody who types something else than there is."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.support.processes import ROOT
from tools.__main__ import COMMANDS, main
from tools.commands.models import resolve
from tools.commands.serve import ROOMS
from tools.failure import Failure
from tools.flags import flags_of
from tools.other_servers import LLAMA_CPP, OPTIONS, SGLANG, VLLM

OURS = {flag.name for _, config in ROOMS for flag in flags_of(config)}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which `tidegate WORDS` ends, as a usage error."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(words))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_tidegate_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name, _, _ in COMMANDS)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-P", "-m", "tools", "models"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None
        program.stdout.close()
        assert program.stderr is not None
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("serv", "tidegate: unknown command 'serv': did you mean serve?  (see tidegate --help)"),
        ("xyzzy", "tidegate: unknown command 'xyzzy'  (see tidegate --help)"),
        ("a.gguf", "unknown command 'a.gguf': to serve it, run: tidegate serve a.gguf  (see"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, word)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", "--prot", "1"], "tidegate chat: unknown option --prot: did you mean --port?"),
        (["serve", "--max_slots=4"], "unknown option --max_slots=4: did you mean --max-slots?"),
        (["serve", "--frobnicate"], "tidegate serve: unknown option --frobnicate  (see"),
        (["serve", "--max-model-len", "9"], "unknown option --max-model-len: use --max-len  (see"),
        (["engine", "-tp", "2"], "unknown option -tp: a model runs on one device here"),
        (["status", "--model", "m"], "tidegate status: unknown option --model  (see"),
        (["ps", "x"], "tidegate ps: unexpected argument 'x'"),
    ],
)
def test_an_unknown_option_is_refused_with_what_takes_its_place(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize("option", OPTIONS)
def test_what_takes_the_place_of_anothers_option_exists(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option not in OURS, "it is an option here as well"
    assert set(re.findall(r"(?<!\S)--[a-z-]+", OPTIONS[option])) <= OURS
    assert f"unknown option {option}: " in refusal(capsys, "serve", "m.gguf", option)


def test_servers_that_share_a_name_for_an_option_share_its_meaning() -> None:
    for one, other in ((VLLM, SGLANG), (VLLM, LLAMA_CPP), (SGLANG, LLAMA_CPP)):
        assert {name for name in one.keys() & other.keys() if one[name] != other[name]} == set()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smollm2", "no model 'smollm2': did you mean smollm2-135m?"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "did you mean smollm2-135m?"),
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("qwen9-900b", "neither a path nor a name in the catalogue"),
    ],
)
def test_a_model_that_is_not_here_is_refused_with_what_to_type(
    model: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(Failure, match=re.escape(said)):
        resolve(model, tmp_path)
