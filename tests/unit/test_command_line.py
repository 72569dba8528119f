"""Options come from the config structs; unknown commands and options are refused."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Any

import msgspec
import pytest

from protocol.config.base import about
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig, SoloConfig
from protocol.config.worker import WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.shared.api_keys import KeyEntry
from protocol.tools.bench import StepBench
from protocol.wire.cluster_key import read_cluster_key
from tests.support.processes import ROOT
from tools.__main__ import COMMANDS, build_parser, main
from tools.bench.config import BenchConfig
from tools.commands.models import resolve
from tools.commands.serve import CONFIGS, plan
from tools.failure import Failure
from tools.flags import Flag, OneLineParser, add_flags, build, flags_of
from tools.models.fetch import home
from tools.other_servers import COMMANDS as FOREIGN_COMMANDS
from tools.other_servers import OPTIONS, REPLACEMENTS

OTHER_CONFIGS = (SoloConfig, BenchConfig, StepBench, KeyEntry)
"""Configs that are options of commands other than `serve`."""
OURS = {flag.name for _, config in CONFIGS for flag in flags_of(config)}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which `tidegate WORDS` reports a usage error."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(words))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_tidegate_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-P", "-m", "tools", "models"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


PORT_COMMANDS = ("chat", "drain", "logs", "profile", "restart", "status", "stop", "top", "why ID")
"""Commands that select a server, and whose other arguments cannot be taken for a port."""


@pytest.mark.parametrize("command", PORT_COMMANDS)
def test_a_port_is_an_argument_or_an_option_of_every_command_that_selects_a_server(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    words = command.split()
    own = ["--steps", "1"] if command == "profile" else []
    said = set()
    for port in (["8123"], ["--port", "8123"], ["--port=8123"]):
        for order in ([*words, *port, *own], [*words, *own, *port]):
            assert main(order) != 0
            said.add(capsys.readouterr().err)
    assert len(said) == 1, "all are understood in the same way"
    assert "8123" in said.pop()


@pytest.mark.parametrize("command", [each for each in PORT_COMMANDS if each != "stop"])
def test_a_port_is_given_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([*command.split(), "8123", "--port", "8124"]))
    assert ended.value.code == 2
    assert "give the port once" in capsys.readouterr().err


def test_a_port_that_is_none_is_refused_and_an_unknown_option_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = "tidegate top: PORT must be a whole number from 1 to 65535, not 'x'  (see"
    assert message in refusal(capsys, "top", "x")
    for words in (["top", "70000"], ["chat", "70000"]):
        assert "from 1 to 65535, not '70000'  (see" in refusal(capsys, *words)
    address = "http://127.0.0.1:8000"
    assert f"not '{address}'; an address: --url {address}  (see" in refusal(capsys, "top", address)
    assert "by its name: tidegate run qwen3-0.6b  (see" in refusal(capsys, "chat", "qwen3-0.6b")
    assert "unknown option --modle" in refusal(capsys, "top", "--modle", "x")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("serv", "tidegate: unknown command 'serv': did you mean serve?  (see tidegate --help)"),
        ("xyzzy", "tidegate: unknown command 'xyzzy'  (see tidegate --help)"),
        ("a.gguf", "unknown command 'a.gguf': to serve it, run: tidegate serve a.gguf  (see"),
        ("list", "tidegate: unknown command 'list': use tidegate models  (see tidegate --help)"),
        ("--verison", "tidegate: unknown option --verison: did you mean --version?  (see tidegate"),
        ("--port", "--port: the command comes first, such as tidegate serve --port  (see"),
        (
            "-hf",
            "unknown option -hf: the model is the first argument, with the same",
        ),
        ("-m", "unknown option -m: the model is the first argument: tidegate serve MODEL  (see"),
        ("--ctx-size=9", "--ctx-size=9: use tidegate serve MODEL --max-len  (see"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, word)


@pytest.mark.parametrize("word", FOREIGN_COMMANDS)
def test_the_replacement_of_another_servers_command_exists(word: str) -> None:
    assert word not in COMMANDS, "it is a command here as well"
    named = re.findall(r"tidegate (?!COMMAND)([a-z]\S*)", FOREIGN_COMMANDS[word])
    assert set(named) <= {*COMMANDS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "--prot", "1"], "tidegate chat: unknown option --prot: did you mean --port?"),
        (["serve", "--max_slots=4"], "unknown option --max_slots=4: did you mean --max-slots?"),
        (["serve", "--frobnicate"], "tidegate serve: unknown option --frobnicate  (see"),
        (["serve", "--max-model-len", "9"], "unknown option --max-model-len: use --max-len  (see"),
        (["engine", "-tp", "2"], "unknown option -tp: use --tensor-parallel  (see"),
        (["serve", "-hf", "a/b:Q8_0"], "unknown option -hf: the model is the first argument"),
        (
            ["run", "-hf", "a/b"],
            "tidegate run: unknown option -hf: the model is the first",
        ),
        (["serve", "-pp", "2"], "unknown option -pp: to use several devices, divide the model"),
        (["run-batch", "-i", "a", "-o", "b"], "-i: the files are arguments: tidegate run-batch IN"),
        (["status", "--model", "m"], "tidegate status: unknown option --model  (see"),
        (["ps", "x"], "tidegate ps: unexpected argument 'x'"),
        (["keys"], "the following arguments are required: ACTION (add, list, revoke)"),
        (["completion"], "the following arguments are required: SHELL (bash, zsh, fish)"),
    ],
)
def test_an_unknown_option_is_refused_and_its_replacement_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_replacement_of_another_servers_option_exists(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option not in OURS, "it is an option here as well"
    assert set(re.findall(r"(?<!\S)--[a-z-]+", OPTIONS[option])) <= OURS
    assert f"unknown option {option}: " in refusal(capsys, "serve", "m.gguf", option)


def test_an_adapter_without_a_path_is_refused_with_the_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refusal(capsys, "serve", "--lora", "x") == "tidegate: --lora 'x' must be NAME=PATH"


def test_servers_that_share_a_name_for_an_option_share_its_meaning() -> None:
    named = [option for options in REPLACEMENTS.values() for option in options.split()]
    assert [option for option, count in Counter(named).items() if count > 1] == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "no model 'smollm2': did you mean smollm2-"),
        ("zebra-900b", "neither a path, nor OWNER/REPO on the Hugging Face Hub, nor a name in"),
        ("./Qwen/Qwen3-0.6B", "no model './Qwen/Qwen3-0.6B': no such file or directory"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B is not in the cache, and $HF_HUB_OFFLINE forbids"),
        ("https://host/m.gguf", "a download by URL needs the file's digest"),
    ],
)
def test_a_missing_model_is_refused_with_a_command_to_run(
    model: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(Failure, match=re.escape(message)):
        resolve(model, tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3:0.6b", "tidegate: no model 'qwen3:0.6b': did you mean qwen3-0.6b or"),
        ("zebra-900b", "not OWNER/REPO, not a URL, and not in the catalogue (tidegate models)"),
    ],
)
def test_the_download_of_a_name_that_does_not_exist_suggests_one(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", model]) == ExitCode.BAD_MODEL
    assert message in capsys.readouterr().err


# ---- options
@pytest.mark.parametrize("config", [*(config for _, config in CONFIGS), *OTHER_CONFIGS])
def test_the_first_line_of_a_configs_docstring_is_a_sentence_for_users(
    config: type[msgspec.Struct],
) -> None:
    """`--help` shows this line alone."""
    line = (config.__doc__ or "").partition("\n")[0]
    assert line.endswith(".")
    assert "Raises" not in line


FLAGS = [flag for _, config in CONFIGS for flag in flags_of(config)]
NUMBERS = [flag for flag in FLAGS if hasattr(flag.shape, "ge")]


def options(*words: str) -> dict[str, object]:
    return vars(build_parser().parse_args(["serve", *words]))


def test_every_field_but_wiring_is_an_option() -> None:
    for _, config in CONFIGS:
        fields = {field.name for field in msgspec.structs.fields(config)}
        wiring = {"model", "address", "worker", "engine", "card", "measurements", "libraries"}
        wiring |= {"recommended_sampling"}
        wiring |= {"api_key_digests", "supervisor_digest", "metrics_directory", "tried_tokenizer"}
        wiring |= {"expected_card"}
        if config is not ServeConfig:
            wiring |= {"log_format", "cluster_key", "kv_export", "kv_address"}
        if config is WorkerConfig:
            wiring |= {"token_budget", "max_drafts", "draft_head"}
            wiring |= {"rank", "world_size", "local_rank", "local_size", "rendezvous"}
        if config is GatewayConfig:
            wiring |= {"prefill", "decode", "engines", "engines_file", "kv_on_failure"}
            wiring |= {"models", "control"}
        assert {flag.field for flag in flags_of(config)} == fields - wiring


def test_no_two_structs_share_an_options_name() -> None:
    names = [flag.field for flag in FLAGS]
    assert len(set(names)) == len(names)
    assert not {"model", "run"} & set(names)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_help_describes_each_option(
    flag: Flag, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # wide enough that no word is broken
    with pytest.raises(SystemExit):
        main(["serve", "--help", "all"])
    words = " ".join(capsys.readouterr().out.split())
    assert flag.name in words
    assert " ".join(flag.description.split()) in words


def test_help_names_both_defaults_of_an_option_that_depends_on_the_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main(["serve", "--help", "all"])
    words = " ".join(capsys.readouterr().out.split())
    assert "same time; 0: automatic (64 on a CPU, 256 on a GPU), or fewer for a model" in words
    assert "requests; 0: automatic (256 on a CPU, 8,192 on a GPU) (from 0 to 1048576" in words


def test_options_that_are_not_given_leave_the_defaults_alone() -> None:
    made = plan(options())
    worker = made.engine.worker
    assert worker == WorkerConfig(model="smollm2-135m", address=worker.address)
    assert made.gateway == GatewayConfig(
        engine=made.engine.address,
        served_name=["smollm2-135m"],
        response_store=str(home() / "responses" / "8000.db"),
        file_store=str(home() / "files" / "8000.db"),
        metrics_directory=str(made.directory / "metrics"),
    )


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_a_number_beyond_its_bounds_is_one_line_that_names_option_and_bounds(
    flag: Flag, capsys: pytest.CaptureFixture[str]
) -> None:
    shape: Any = flag.shape
    for bound, step in ((shape.ge, -1), (shape.le, 1)):
        line = refusal(capsys, "serve", f"{flag.name}={bound + step}")
        assert flag.name in line
        assert f"from {shape.ge:g} to {int(shape.le)}" in line
        assert flag.read(str(bound)) == bound


@pytest.mark.parametrize("text", ["", "many", "1.5", "nan", " 8"])
def test_an_option_that_is_no_whole_number_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--max-slots must be a whole number" in refusal(capsys, "serve", f"--max-slots={text}")


def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "one of auto, bfloat16, float32, not 'int3'" in refusal(capsys, "serve", "--dtype=int3")


def test_an_unknown_or_shortened_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-slo" in refusal(capsys, "serve", "--max-slo", "4")


def test_an_error_of_a_struct_is_reported_in_option_names() -> None:
    with pytest.raises(Failure, match="--block-tokens") as refused:
        plan(options("--block-tokens", "24"))
    assert refused.value.exit_code == 2


def test_a_switch_that_is_on_by_default_is_switched_off() -> None:
    assert plan(options()).engine.prefix_cache
    assert not plan(options("--no-prefix-cache")).engine.prefix_cache


def test_a_list_is_given_by_repeating_its_option() -> None:
    given = options("--served-name", "a", "--served-name", "b")
    assert plan(given).gateway.served_name == ["a", "b"]


def test_any_struct_can_be_given_options() -> None:
    class Oven(msgspec.Struct, frozen=True):
        light: Annotated[bool, about("lights up")] = False
        rack: Annotated[list[str], about("what lies on a rack")] = []
        heat: Annotated[float, about("100% is 250 degrees", ge=0.5)] = 180

    made = OneLineParser(prog="oven")
    add_flags(made, Oven, title="oven")
    given = vars(made.parse_args(["--light", "--rack=bread", "--rack=cake", "--heat=0.5"]))
    assert build(Oven, given) == Oven(light=True, rack=["bread", "cake"], heat=0.5)
    assert build(Oven, vars(made.parse_args([]))) == Oven()
    assert "100% is 250 degrees (at least 0.5; default 180)" in made.format_help()


def test_the_text_of_an_option_is_checked_by_the_fields_own_type() -> None:
    (port,) = [flag for flag in flags_of(GatewayConfig) if flag.field == "port"]
    assert port.read("8001") == 8001
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 65535, not '0'"):
        port.read("0")


def test_a_key_file_is_written_once_and_its_path_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "cluster.key")
    assert main(["cluster-key", path]) == 0
    assert path in capsys.readouterr().out
    assert read_cluster_key(path) is not None
    assert main(["cluster-key", path]) == 1
    assert capsys.readouterr().err == f"tidegate: cannot write {path}: File exists\n"


class Numbers(msgspec.Struct):
    """A config with a tuple of numbers."""

    sizes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=9)], ...], about("how many")] = (
        1,
        2,
    )
    rates: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], about("how often")] = ()


def numbers(*words: str) -> Numbers:
    made = OneLineParser(prog="numbers")
    add_flags(made, Numbers, title="numbers")
    return build(Numbers, vars(made.parse_args(words)))


def test_a_tuple_is_an_option_that_takes_its_numbers_with_commas() -> None:
    assert numbers() == Numbers()
    assert numbers("--sizes", "3,1", "--rates", "0.5") == Numbers(sizes=(3, 1), rates=(0.5,))
    sizes, rates = flags_of(Numbers)
    assert (sizes.metavar, rates.metavar) == ("N,...", "X,...")
    assert sizes.help == "how many (from 1 to 9; default 1,2)"
    assert rates.help == "how often (above 0)"


@pytest.mark.parametrize("text", ["0", "1,10", "1,,2", "1 2", ""])
def test_each_number_of_a_tuple_is_within_its_bounds(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        numbers("--sizes", text)
    assert "--sizes must be a whole number from 1 to 9" in capsys.readouterr().err
