"""The file of --config, and `tidegate config`, which shows where each option comes from."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.config.gateway import GatewayConfig
from tests.support.commands import CommandRun, run_command
from tools.__main__ import build_parser
from tools.commands.config import to_toml
from tools.commands.serve import CONFIGS, plan
from tools.config_file import FileSettings, apply_config_file, parse
from tools.failure import Failure
from tools.flags import Flag, flags_of
from tools.http.web import KEY_VARIABLE
from tools.processes.serve_plan import ServePlan

FLAGS = [flag for _, config in CONFIGS for flag in flags_of(config)]
PATHS = {"FILE", "DIRECTORY"}


def settings(text: str, folder: Path = Path("/etc")) -> FileSettings:
    return parse(text, FLAGS, name="tidegate.toml", folder=folder)


def parsed(command: str, *words: str) -> argparse.Namespace:
    options = build_parser(command).parse_args([command, *words])
    options.settings = apply_config_file(options)
    return options


def planned(*words: str) -> ServePlan:
    return plan(vars(parsed("serve", *words)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tidegate.toml"


@pytest.fixture(autouse=True)
def _without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


# ---- reading
def test_a_value_of_each_kind_is_read() -> None:
    found = settings(
        'model = "qwen3-0.6b"\nport = 8001\nserved_name = ["a", "b"]\nprefix_cache = false\n'
        "timeout_s = 3\ndtype = 'float32'\n"
    )
    assert found.values == {
        "model": ["qwen3-0.6b"],
        "port": 8001,
        "served_name": ["a", "b"],
        "prefix_cache": False,
        "timeout_s": 3.0,
        "dtype": "float32",
    }
    assert found.origin("port") == "tidegate.toml:2"


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_each_option_can_be_set_to_its_default_in_a_file(flag: Flag) -> None:
    default = list(flag.default) if flag.is_tuple else flag.default
    assert settings(f"{flag.field} = {to_toml(default)}").values == {flag.field: flag.default}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# c\n\nprot = 1", "tidegate.toml:3: unknown name 'prot': did you mean port?"),
        ("max-len = 1", "tidegate.toml:1: unknown name 'max-len': did you mean max_len?"),
        ("no_prefix_cache = true", "unknown name 'no_prefix_cache': write prefix_cache = false"),
        ("max_model_len = 1", "unknown name 'max_model_len': use max_len"),
        ("xyzzy = 1", "tidegate.toml:1: unknown name 'xyzzy'$"),
        ("[serve]\nport = 1", "tidegate.toml:1: unknown name 'serve'"),
        ("port = 70000", "tidegate.toml:1: port must be a whole number from 1 to 65535, not 70000"),
        ("port = '8001'", "port must be a whole number from 1 to 65535, not '8001'"),
        ("port = true", "port must be a whole number from 1 to 65535, not True"),
        ("prefix_cache = 1", "prefix_cache must be true or false, not 1"),
        ("dtype = 'int3'", "dtype must be one of auto, bfloat16, float32, not 'int3'"),
        ("served_name = 'a'", "served_name must be a list, each item text"),
        ("served_name = [1]", "served_name must be text, not \\[1\\]"),
        ("api_key = ['sk-secret', 1]", "api_key must be text, not \\.\\.\\.$"),
        ("model = 1", "model must be text, a list of texts, or tables"),
        ("model = []", "model must be text, a list of texts, or tables"),
        ("port = ", "tidegate.toml: Invalid value"),
        ("port = 1\nport = 2", "tidegate.toml: Cannot overwrite a value"),
        ("model = 'a'\nmodels = 'b'", "models cannot be combined with model"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_a_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(text)


def test_a_bound_is_checked_by_the_fields_own_type() -> None:
    for flag in FLAGS:
        high = getattr(flag.shape, "le", None)
        if high is None:
            continue
        settings(f"{flag.field} = {to_toml(high)}")
        with pytest.raises(ValueError, match=f"{flag.field} must be .*{int(high)}"):
            settings(f"{flag.field} = {to_toml(high + 1)}")


def test_a_line_is_found_whatever_its_quotes_and_whatever_stands_around_it() -> None:
    found = settings(
        '  "port" = 1 # port = 3\n\n# max_len = 2\nmax_len= 5\n[[model]]\npath = "a"\n'
    )
    assert found.lines == {"port": 1, "max_len": 4, "model": 5, "models": 5}


def test_paths_start_at_the_directory_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    text = """
model = ["m.gguf", "small=m.gguf", "none.gguf", "qwen3-0.6b"]
api_keys = "keys.toml"
kv_disk = "/var/kv"
lora = ["a=loras/a"]
response_store = "none"
"""
    assert settings(text, tmp_path).values == {
        "model": [f"{tmp_path}/m.gguf", f"small={tmp_path}/m.gguf", "none.gguf", "qwen3-0.6b"],
        "api_keys": f"{tmp_path}/keys.toml",
        "kv_disk": "/var/kv",
        "lora": [f"a={tmp_path}/loras/a"],
        "response_store": "none",
    }


def test_options_that_name_files_are_declared_as_paths() -> None:
    texts = [flag for flag in FLAGS if not flag.is_switch]
    assert all(flag.is_path == (flag.metavar in PATHS) for flag in texts)


# ---- precedence
def test_an_option_of_the_command_line_is_used_in_place_of_the_file(file: Path) -> None:
    file.write_text("port = 8001\nmax_len = 512\nprefix_cache = false\nserved_name = ['a']\n")
    made = planned("--config", str(file), "--port", "8002", "--prefix-cache", "--served-name=b")
    assert (made.gateway.port, made.engine.worker.max_len) == (8002, 512)
    assert made.engine.prefix_cache
    assert made.gateway.served_name == ["b"]
    assert not planned("--config", str(file)).engine.prefix_cache


def test_a_model_of_the_command_line_replaces_all_models_of_the_file(file: Path) -> None:
    file.write_text('[[model]]\npath = "/a"\n[[model]]\npath = "/b"\n')
    assert list(planned("--config", str(file)).models) == ["a", "b"]
    assert planned("/c", "--config", str(file)).engine.worker.model == "/c"


def test_models_in_the_file_have_options_of_their_own(file: Path) -> None:
    file.write_text('max_len = 64\n[[model]]\npath = "/a"\n[[model]]\npath = "/b"\nmax_len = 512\n')
    made = planned("--config", str(file))
    assert [each.worker.max_len for each in made.models.values()] == [64, 512]


def test_an_engine_reads_its_options_from_a_file(file: Path) -> None:
    file.write_text('model = "/a"\nrole = "decode"\n')
    options = parsed("engine", "--config", str(file))
    assert (options.model, options.role) == ("/a", "decode")
    file.write_text("gateways = 2\n")
    with pytest.raises(Failure, match="unknown name 'gateways'"):
        parsed("engine", "--config", str(file))


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_a_file_that_cannot_be_read_is_a_usage_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=f"--config {tmp_path}/?{name.strip('.')}") as refused:
        parsed("serve", "--config", str(tmp_path / name))
    assert refused.value.exit_code == 2


def test_an_error_about_several_options_says_which_of_them_the_file_sets(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text("\nngram_min = 9\n")
    done = run_command(capfd, "config", "--config", str(file), "--ngram-max", "4")
    assert done == CommandRun(
        2, "", f"tidegate: --ngram-min (9) exceeds --ngram-max (4)  ({file}:2)\n"
    )


# ---- tidegate config
def effective(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """Return the options that `tidegate config` shows, and its output."""
    done = run_command(capfd, "config", *words)
    assert (done.code, done.err) == (0, "")
    return tomllib.loads(done.out), done.out


def test_every_option_is_shown_with_its_source(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text("port = 8001\nprefix_cache = false\n")
    words = ["--config", str(file), "--max-slots", "4", "--no-log-requests", "--prefix-cache"]
    shown, text = effective(capfd, *words)
    assert shown.keys() - {"model"} == {flag.field for flag in FLAGS}
    for line in (
        'model = "smollm2-135m"  # default',
        f"port = 8001  # {file}:1",
        "max_slots = 4  # --max-slots",
        "log_requests = false  # --no-log-requests",
        "prefix_cache = true  # --prefix-cache",
        f'host = "{GatewayConfig().host}"  # default',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    "content",
    [
        "",
        'model = ["/a", "b=/b"]\nload = "first-use"\n',
        'api_keys = "keys.toml"\ndefault_sampling = \'{"temperature": 0.2}\'\ngpu_memory = 0.5\n',
        'port = 8001\n[[model]]\npath = "/a"\n[[model]]\npath = "/b"\nalias = ["x"]\nmax_len = 9\n',
    ],
)
def test_the_output_is_a_file_with_the_same_effect(
    content: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text(content)
    again = file.with_name("again.toml")
    again.write_text(effective(capfd, "--config", str(file))[1])
    before, after = planned("--config", str(file)), planned("--config", str(again))
    no_key = {"supervisor_digest": ""}  # it is new in each run
    assert replace(before.gateway, **no_key) == replace(after.gateway, **no_key)
    assert (before.engine, before.models) == (after.engine, after.models)
    first = effective(capfd, "--config", str(again))[0]
    again.write_text(effective(capfd, "--config", str(again))[1])
    assert effective(capfd, "--config", str(again))[0] == first


def test_keys_are_not_shown_and_the_environment_replaces_those_of_the_file(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('api_key = ["sk-file", "sk-second"]\n')
    _, text = effective(capfd, "--config", str(file))
    assert f"# api_key: 2 not shown  # {file}:1" in text
    monkeypatch.setenv(KEY_VARIABLE, "sk-environment")
    _, text = effective(capfd, "--config", str(file))
    assert f"# api_key: 1 not shown  # ${KEY_VARIABLE}" in text
    _, text = effective(capfd, "--config", str(file), "--api-key", "sk-option")
    assert f"# api_key: 2 not shown  # --api-key and ${KEY_VARIABLE}" in text
    assert "sk-" not in text


@pytest.mark.parametrize("text", ["", 'say "hi"', "a\\b\n\t", "\x7f\x01", "é 漢 😀", "# no"])
def test_any_text_is_written_as_toml(text: str) -> None:
    assert tomllib.loads(f"x = {to_toml([text, 1, 2.5, True])}") == {"x": [text, 1, 2.5, True]}
