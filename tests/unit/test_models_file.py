"""`tidegate serve --models FILE`: each model has options of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import write_tiny_llama
from tools.__main__ import build_parser
from tools.commands.serve import plan
from tools.failure import Failure
from tools.processes.serve_plan import ServePlan
from tools.processes.several_models import plan_models

SEVERAL = """
[[model]]
path = "/models/phi"

[[model]]
path = "Qwen/Qwen3-0.6B"
name = "small"
alias = ["fast", "cheap"]
load = "first-use"
max_len = 512
device = "cpu"
gpu_memory = 0.25
kv_memory_gib = 1
token_budget = 128
tool_format = "hermes"
chat_template = "own.jinja"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(SEVERAL)
    return path


def serve(*words: str) -> ServePlan:
    return plan(vars(build_parser("serve").parse_args(["serve", *words])))


def test_a_model_has_the_options_of_its_table_and_else_those_of_the_command_line(
    file: Path,
) -> None:
    made = serve("--models", str(file), "--max-len", "64", "--max-slots", "3")
    phi, small = made.models.values()
    assert [phi.worker.max_len, small.worker.max_len] == [64, 512]
    assert [phi.worker.max_slots, small.worker.max_slots] == [3, 3]
    assert [phi.token_budget, small.token_budget] == [phi.worker.token_budget, 128]
    assert (small.worker.device, small.worker.gpu_memory) == ("cpu", 0.25)
    assert small.worker.kv_memory_gib == 1.0
    assert [phi.worker.model, small.worker.model] == ["/models/phi", "Qwen/Qwen3-0.6B"]
    first, second = made.gateway.models
    assert [first.served_name, second.served_name] == [["phi"], ["small", "fast", "cheap"]]
    assert [first.load, second.load] == ["start", "first-use"]
    assert [first.tool_format, second.tool_format] == ["auto", "hermes"]
    assert [first.chat_template, second.chat_template] == ["", str(file.parent / "own.jinja")]


def test_a_relative_path_starts_at_the_directory_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "models.toml"
    file.write_text(
        '[[model]]\npath = "a"\nmmproj = "enc.gguf"\nlora = ["l=../l"]\nkv_disk = "/kv"\n'
        'journal = "j"\nload = "first-use"\n[[model]]\npath = "a"\nname = "b"\nmmproj = "none"\n'
    )
    first, second = serve("--models", str(file)).models.values()
    assert first.worker.model == str(tmp_path / "a")
    assert first.worker.mmproj == str(tmp_path / "enc.gguf")
    assert first.worker.lora == [f"l={tmp_path.parent}/l"]
    assert first.worker.kv_disk == "/kv"
    assert first.journal == str(tmp_path / "j" / "a")
    assert second.worker.mmproj == "none"


def test_a_file_with_one_model_makes_it_one_that_can_be_unloaded(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    file = tmp_path / "models.toml"
    file.write_text(f'[[model]]\npath = "{tmp_path}"\nname = "only"\nload = "first-use"\n')
    made = serve("--models", str(file), "--idle-unload-s", "60")
    assert list(made.models) == ["only"]
    assert plan_models(made.models, made.gateway.models, made.serve).loaded == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected only tables \[\[model\]\], and at least one"),
        ("port = 1", r"expected only tables \[\[model\]\], and at least one"),
        ("[[model]", "models.toml"),
        ("[[model]]", "model 1: .*path"),
        ('[[model]]\npath = "/a"\nport = 1', "model 1: unknown key 'port'"),
        ('[[model]]\npath = "/a"\ndraft_model = "/b"', "model 1: unknown key 'draft_model'"),
        ('[[model]]\npath = "/a"\nmax_len = -1', "model 1: max_len: must be a whole number from 0"),
        ('[[model]]\npath = "/a"\nload = "never"', "model 1: load: must be one of"),
        ('[[model]]\npath = "/a"\nalias = "b"', "model 1: .*alias"),
        ('[[model]]\npath = "/a"\n[[model]]\npath = "/b/a"', "two models are named a"),
        (
            '[[model]]\npath = "/a"\n[[model]]\npath = "/b"\nalias = ["a"]',
            "two models are named a",
        ),
        ('[[model]]\npath = "/a"\nblock_tokens = 3', "must be a power of two"),
    ],
)
def test_a_wrong_file_is_refused_with_the_table_and_the_key(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(Failure, match=message) as refused:
        serve("--models", str(file))
    assert refused.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=f"{tmp_path}/none.toml"):
        serve("--models", str(tmp_path / "none.toml"))


def test_models_come_from_the_command_line_or_from_a_file(file: Path) -> None:
    with pytest.raises(Failure, match="models cannot be combined with MODEL"):
        serve("/models/phi", "--models", str(file))
