"""`tidegate chat` on a terminal, and `tidegate run` with a running server. A scripted engine gives
the answers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGINT
from threading import Thread

import pytest

from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT, Program
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.scripted_engine import ScriptedEngine, TokenReply, prompt_of, text_reply
from tests.support.waiting import eventually
from tools.http.web import WebServer

GATEWAY = {"reasoning_format": "qwen3"}
TOOL = [sys.executable, "-P", "-m", "tools"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"TIDEGATE_HOME": str(tmp_path / "home"), "TERM": "xterm"}


def chat(gateway: GatewayProcess, home: dict[str, str], *words: str) -> PseudoTerminal:
    command = [*TOOL, "chat", "--url", gateway.url, *words]
    terminal = PseudoTerminal(command, environment=home)
    assert eventually(lambda: terminal.shows("Ctrl-D ends")), terminal.text
    return terminal


def say(terminal: PseudoTerminal, line: str, result: str) -> None:
    """Type a line, and wait until `result` is shown after it."""
    terminal.text = ""
    terminal.press(line.encode() + b"\n")
    assert eventually(lambda: terminal.shows(result)), terminal.text


def end_input(terminal: PseudoTerminal, result: str) -> None:
    """Press Ctrl-D when the next line is read after `result`, and wait for the end. Before that,
    the terminal would keep it as a null character, which ends nothing."""

    def is_read() -> bool:
        return terminal.shows(result) and "> " in terminal.text.partition(result)[2]

    assert eventually(is_read), terminal.text
    terminal.press(b"\x04")
    assert terminal.process.wait(60) == 0


def name_of(gateway: GatewayProcess) -> str:
    return WebServer(gateway.url).model_names()[0]


def counting(engine: ScriptedEngine) -> None:
    """Answer with the number of the request."""

    def script(generate: Generate) -> TokenReply:
        return text_reply(f"answer {len(engine.generates)}")

    engine.script = script


def test_markdown_is_shown_and_escape_sequences_are_not(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    engine.script = lambda generate: text_reply("# Hi\n\n**b** \x1b[2J `c`\n- d", size=2)
    with chat(gateway, home) as terminal:
        say(terminal, "hello", "stop]")
        text = terminal.text.replace("\r\n", "\n")
        assert "\x1b[1;4mHi\x1b[0m\n\n\x1b[1mb\x1b[22m ?[2J \x1b[36mc\x1b[39m\n• d\n" in text
    with chat(gateway, home, "--plain") as terminal:
        say(terminal, "hello", "stop]")
        assert "# Hi\n\n**b** ?[2J `c`\n- d\n" in terminal.text.replace("\r\n", "\n")


def test_reasoning_is_shown_faintly_and_not_sent_again(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    engine.script = lambda generate: text_reply("<think>Hm \x1b[2J.</think>**b**", size=2)
    with chat(gateway, home) as terminal:
        say(terminal, "hello", "stop]")
        text = terminal.text.replace("\r\n", "\n")
        assert "\x1b[2mHm ?[2J.\x1b[0m\n\n\x1b[1mb\x1b[22m\n" in text
        say(terminal, "again", "stop]")
    assert "Hm" not in prompt_of(engine)
    command = [*TOOL, "chat", "--url", gateway.url]
    ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "**b**\n"


def test_an_answer_is_repeated_saved_and_forgotten(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str], tmp_path: Path
) -> None:
    counting(engine)
    with chat(gateway, home, "--system", "Be brief.") as terminal:
        say(terminal, "/retry", "")
        say(terminal, "hello", "answer 1")
        say(terminal, "/retry", "answer 2")
        say(terminal, f"/save {tmp_path}/a.json", "saved 2 messages")
        say(terminal, f"/save {tmp_path}/a.md", "saved 2 messages")
        say(terminal, "/reset", "conversation cleared")
        say(terminal, f"/save {tmp_path}/b.json", "saved 0 messages")
        say(terminal, "/quit", "")
        assert terminal.process.wait(60) == 0
    roles = ["system", "user", "assistant"]
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [each["role"] for each in saved["messages"]] == roles
    assert [each["content"] for each in saved["messages"]] == ["Be brief.", "hello", "answer 2"]
    name = name_of(gateway)
    assert (tmp_path / "a.md").read_text() == (
        f"# Chat with {name}\n\n## System\n\nBe brief.\n\n## User\n\nhello\n\n"
        "## Assistant\n\nanswer 2\n"
    )
    assert len(json.loads((tmp_path / "b.json").read_text())["messages"]) == 1


def test_a_saved_conversation_is_loaded_and_continued(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str], tmp_path: Path
) -> None:
    counting(engine)
    with chat(gateway, home, "--system", "Be brief.") as terminal:
        say(terminal, "an elephant", "answer 1")
        say(terminal, f"/save {tmp_path}/a.json", "saved 2 messages")
        say(terminal, f"/save {tmp_path}/a.md", "saved 2 messages")
    with chat(gateway, home) as terminal:
        say(
            terminal,
            f"/load {tmp_path}/a.json",
            f"loaded 2 messages of a chat with {name_of(gateway)}",
        )
        say(terminal, f"/load {tmp_path}/a.md", "")  # is refused, and changes nothing
        say(terminal, "and a mouse", "answer 2")
    prompt = prompt_of(engine)
    assert [
        prompt.find(each) for each in ("Be brief.", "an elephant", "answer 1", "mouse")
    ] == sorted(prompt.find(each) for each in ("Be brief.", "an elephant", "answer 1", "mouse"))
    assert "Be brief." in prompt


def test_a_parameter_is_set_within_its_range_and_listed(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    counting(engine)
    with chat(gateway, home, "--temperature", "1.5") as terminal:
        say(
            terminal,
            "/set temperature 0.25",
            "temperature         0.25        a number from 0 to 2",
        )
        say(terminal, "/set temperature 3", "")  # is refused
        say(terminal, "/set top-k 7", "top_k               7")
        say(terminal, "hello", "answer 1")
        assert (engine.generates[0].params.temperature, engine.generates[0].params.top_k) == (
            0.25,
            7,
        )
        say(terminal, "/set top_k default", "top_k               default")
        say(terminal, "/set", "temperature         0.25")
        say(terminal, "hello", "answer 2")
        assert engine.generates[1].params.top_k != 7


def test_an_answer_is_wrapped_at_the_width_of_the_terminal(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    engine.script = lambda generate: text_reply(("sailed away " * 12).strip(), size=3)
    with chat(gateway, home) as terminal:  # which has 100 columns
        say(terminal, "hello", "stop]")
        lines = terminal.text.replace("\r\n", "\n").split("\n")
    assert " ".join(["sailed away"] * 8) in lines, lines
    assert " ".join(["sailed away"] * 4) in lines


def test_a_message_has_several_lines(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    counting(engine)
    with chat(gateway, home) as terminal:
        terminal.press(b'"""first\n')
        say(terminal, 'second"""', "answer 1")
        assert "first\nsecond" in prompt_of(engine)
        terminal.press(b"third\\\n")
        say(terminal, "fourth", "answer 2")
        assert "third\nfourth" in prompt_of(engine)


def test_earlier_lines_are_kept_and_found(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    counting(engine)
    file = Path(home["TIDEGATE_HOME"]) / "chat_history"
    with chat(gateway, home) as terminal:
        say(terminal, "an elephant", "answer 1")
        say(terminal, "a mouse", "answer 2")
        end_input(terminal, "answer 2")
    assert file.read_text() == "an elephant\na mouse\n"
    assert file.stat().st_mode & 0o777 == 0o600
    with chat(gateway, home) as terminal:
        assert eventually(lambda: terminal.shows("> ")), terminal.text
        terminal.press(b"\x12")  # Ctrl-R
        assert eventually(lambda: terminal.shows("reverse-i-search")), terminal.text
        terminal.press(b"eleph")
        assert eventually(lambda: terminal.shows("an elephant")), terminal.text
        terminal.press(b"\r")
        assert eventually(lambda: terminal.shows("answer 3")), terminal.text
        assert "an elephant" in prompt_of(engine)
    with chat(gateway, home, "--no-history") as terminal:
        say(terminal, "a secret", "answer 4")
        end_input(terminal, "answer 4")
    assert "secret" not in file.read_text()


def test_the_model_is_shown_and_an_unknown_one_is_refused(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    counting(engine)
    with chat(gateway, home) as terminal:
        say(terminal, "/model", f"model: {name_of(gateway)}")
        say(terminal, "/model nothing", "")
        say(terminal, "hello", "answer 1")
        assert engine.generates


def test_ctrl_c_stops_an_answer_and_keeps_the_text_so_far(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str], tmp_path: Path
) -> None:
    engine.is_paused = True
    with chat(gateway, home) as terminal:
        terminal.press(b"hello\n")
        assert eventually(lambda: bool(engine.generates))
        terminal.process.send_signal(SIGINT)
        assert eventually(lambda: terminal.shows("stopped by you")), terminal.text
        assert eventually(lambda: bool(engine.aborts))


def test_an_answer_in_a_pipe_is_exactly_what_the_model_wrote(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("**b** \x1b[2J\n")
    command = [*TOOL, "chat", "--url", gateway.url]
    ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "**b** \x1b[2J\n\n"


def test_a_program_that_is_no_model_server_is_not_taken_for_a_server_that_is_down(
    tmp_path: Path,
) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [*TOOL, "chat", "--url", url]
        ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, cwd=ROOT)
        server.shutdown()
    assert ran.returncode == 1
    assert f"the program at {url} serves no models" in ran.stderr
    ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, cwd=ROOT)
    assert f"no server answers at {url}" in ran.stderr


# ---- tidegate run
def run(
    gateway: GatewayProcess, *words: str, said: str | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*TOOL, "run", *words, "--url", gateway.url]
    source = {"input": said} if said is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **source)  # type: ignore[call-overload]


def test_without_a_prompt_a_terminal_has_a_chat(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    counting(engine)
    words = ["run", name_of(gateway), "--url", gateway.url, "--temperature", "0.5"]
    with PseudoTerminal([*TOOL, *words], environment=home) as terminal:
        assert eventually(lambda: terminal.shows("Ctrl-D ends")), terminal.text
        say(terminal, "hello", "answer 1")
        assert engine.generates[0].params.temperature == 0.5
        end_input(terminal, "answer 1")
    for option in ("--json", "--raw"):  # of one answer
        with PseudoTerminal([*TOOL, *words, option], environment=home, has_stderr=True) as terminal:
            assert terminal.process.wait(60) == 2
            assert eventually(lambda shown=terminal: shown.shows("the prompt is empty"))  # type: ignore[misc]


def test_only_the_answer_is_printed(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    engine.script = lambda generate: text_reply("**b** \x1b[2J", size=1)
    ran = run(gateway, name_of(gateway), "hello", "--system", "Be brief.", "--temperature", "0")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "**b** \x1b[2J\n", "")
    (request,) = engine.generates
    assert "Be brief." in prompt_of(engine)
    assert request.params.temperature == 0


def test_reasoning_is_shown_on_a_terminal_only(
    engine: ScriptedEngine, gateway: GatewayProcess, home: dict[str, str]
) -> None:
    engine.script = lambda generate: text_reply("<think>Hm.</think>b", size=2)
    words = ["run", name_of(gateway), "hello", "--url", gateway.url]
    with PseudoTerminal([*TOOL, *words], environment=home, has_stderr=True) as terminal:
        assert terminal.process.wait(60) == 0
        assert eventually(lambda: terminal.shows("b\r\n")), terminal.text
    assert "\x1b[2mHm.\x1b[0m\r\n\r\nb\r\n" in terminal.text
    ran = run(gateway, *words[1:3])
    assert (ran.stdout, ran.stderr) == ("b\n", "")


@pytest.mark.parametrize(
    ("words", "said", "expected"),
    [
        (["before"], "after\n", "before\n\nafter\n"),
        ([], "only stdin", "only stdin"),
        (["only"], "", "only"),
        (["only"], None, "only"),
    ],
)
def test_the_prompt_is_the_argument_and_what_is_piped(
    words: list[str],
    said: str | None,
    expected: str,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    counting(engine)
    ran = run(gateway, name_of(gateway), "--raw", *words, said=said)
    assert (ran.returncode, ran.stdout) == (0, "answer 1\n"), ran.stderr
    assert prompt_of(engine) == expected


def test_the_response_of_the_api_is_printed(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    counting(engine)
    ran = run(gateway, name_of(gateway), "hello", "--json")
    body = json.loads(ran.stdout)
    assert body["choices"][0]["message"]["content"] == "answer 1"
    assert body["usage"]["completion_tokens"] == len("answer 1") + 1  # with the end


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["m"], 2, "the prompt is empty: tidegate run MODEL PROMPT, or pipe it to stdin"),
        (["m", "x", "--raw", "--system", "y"], 2, "--system needs the chat template"),
        (["no-such-model", "x"], 1, "no-such-model"),
        (["m", "x", "--temperature", "3"], 2, "must be a number from 0 to 2; got '3'"),
    ],
)
def test_a_wrong_command_is_one_line_on_stderr(
    words: list[str], code: int, message: str, gateway: GatewayProcess
) -> None:
    ran = run(gateway, *words)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_ctrl_c_ends_an_answer_without_a_message(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.is_paused = True
    command = ["-P", "-m", "tools", "run", name_of(gateway), "hello", "--url", gateway.url]
    with Program(command) as program:
        assert eventually(lambda: bool(engine.generates))
        program.signal(SIGINT)
        assert program.end() == 130
        assert (program.out, [line for line in program.err if line]) == ([], [])
    assert eventually(lambda: bool(engine.aborts))


def test_characters_that_control_a_terminal_are_replaced_on_one(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("a\x1b[2Jb")
    command = [*TOOL, "run", name_of(gateway), "hello", "--url", gateway.url]
    with PseudoTerminal(command) as terminal:
        assert eventually(lambda: terminal.shows("a?[2Jb")), terminal.text
