"""`protocol.offline.LLM`: the same answers as over HTTP, and processes that end with the script."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from protocol.sdk.offline import LLM
from protocol.wire.errors import EngineError, EngineLost, InvalidRequest, ServingError, UnknownModel
from tests.support.processes import ROOT, Program, descendants_of, is_alive
from tests.support.server import Server
from tests.support.tiny_checkpoint import FITTING, write_tiny_llama
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}w1"
OPTIONS: dict[str, Any] = {"max_slots": 4, "threads": 1}
OWN = {"id", "created"}
"""Fields that differ between two answers to the same request."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that our own kernels compute, so that the answers have the same bits however requests
    are batched."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, max_position_embeddings=4096, **FITTING)
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), chat_template=str(model / "template.jinja"), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    template = ["--chat-template", str(model / "template.jinja")]
    with Server(*options, *template, model=str(model)) as server:
        yield server


def without_own(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in OWN}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"seed": 5, "temperature": 1.0, "n": 2, "logprobs": 2},
        {"seed": 6, "stop": ["w5", "w7"], "echo": True},
    ],
)
def test_prompts_get_the_answers_that_http_gives(
    llm: LLM, server: Server, params: dict[str, Any]
) -> None:
    prompts: list[str | list[int]] = ["w5 w6 w7", [5, 6, 7], "w80"]
    results = llm.generate(prompts, params, max_tokens=12)
    for prompt, result in zip(prompts, results, strict=True):
        body = {**params, "prompt": prompt, "max_tokens": 12}
        over_http = requests.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
        assert without_own(result.body) == without_own(over_http)
        assert result.texts == [choice["text"] for choice in over_http["choices"]]
        assert result.text == result.texts[0]
        assert result.usage == over_http["usage"]
        assert result.finish_reason == over_http["choices"][0]["finish_reason"]


def test_conversations_get_the_answers_that_http_gives(llm: LLM, server: Server) -> None:
    conversations = [
        [{"role": "user", "content": "w5"}],
        [{"role": "system", "content": "w8 w9"}, {"role": "user", "content": "w3"}],
    ]
    params = {"seed": 3, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    results = llm.chat(conversations, params)
    (alone,) = llm.chat(conversations[0], params)
    assert without_own(alone.body) == without_own(results[0].body)
    for messages, result in zip(conversations, results, strict=True):
        body: dict[str, Any] = {**params, "messages": messages}
        over_http = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
        assert without_own(result.body) == without_own(over_http)
        assert result.message == over_http["choices"][0]["message"]
        assert result.text == result.message["content"]


def test_many_prompts_are_answered_in_their_order(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    results = llm.generate([f"w{3 + n % 80}" for n in range(60)], echo=True, progress=True)
    assert all(r.text.startswith(f"w{3 + n % 80}") for n, r in enumerate(results))
    assert "60 of 60 requests" in capfd.readouterr().err
    assert llm.generate([]) == []
    assert capfd.readouterr().err == ""


def test_one_text_or_list_of_ids_is_one_prompt(llm: LLM) -> None:
    (text,) = llm.generate("w5 w6", max_tokens=2, temperature=0)
    (ids,) = llm.generate([5, 6], max_tokens=2, temperature=0)
    assert text.text == ids.text


def test_a_wrong_request_raises_its_error_and_the_others_go_on(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["w5", [10**6], "w6"]
    with pytest.raises(InvalidRequest, match="prompt") as refused:
        llm.generate(prompts, max_tokens=3)
    assert refused.value.param is not None
    results = llm.generate(prompts, max_tokens=3, raises=False)
    assert [isinstance(each, ServingError) for each in results] == [False, True, False]
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("w5", temperature=99)
    with pytest.raises(InvalidRequest, match="stream: an LLM returns whole answers"):
        llm.generate("w5", stream=True)
    with pytest.raises(UnknownModel):
        llm.generate("w5", model="another")
    with pytest.raises(InvalidRequest, match="request 0 is not JSON"):
        llm.generate("w5", stop={object()})
    assert llm.generate("w5", max_tokens=2, ignore_eos=True)[0].text


def test_threads_share_an_llm(llm: LLM) -> None:
    texts: dict[int, list[str]] = {}

    def ask(seed: int) -> None:
        texts[seed] = [r.text for r in llm.generate(["w5", "w6"] * 5, seed=seed, max_tokens=6)]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert texts[seed] == [
            r.text for r in llm.generate(["w5", "w6"] * 5, seed=seed, max_tokens=6)
        ]


def test_the_starter_uses_no_cpu_after_the_start(llm: LLM) -> None:
    """To ask again and again whether the engine is ready would take a sixth of a core."""
    assert llm.generate("w5", max_tokens=2, ignore_eos=True)
    (starter,) = (pid for pid, line in descendants_of(os.getpid()) if "-m tools.offline" in line)
    idle = psutil.Process(starter)
    # Percent of one second. The first second may still include the end of the start.
    assert eventually(lambda: idle.cpu_percent(interval=1.0) < 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_slotz": 3}, r"max_slotz: unknown option; did you mean max_slots\?"),
        ({"max_model_len": 8}, "max_model_len: unknown option; use max_len$"),
        ({"max_len": "long"}, "max_len: must be a whole number"),
        ({"tool_format": "nonsense"}, "nonsense"),
        ({"port": 8000}, "port: unknown option$"),
        ({"max_len": object()}, "an option is not JSON"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    model: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        LLM(str(model), **options)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(EngineError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"), log_file=str(log))
    assert "nowhere" in log.read_text()


SCRIPT = """
import gc, os, sys, threading
from protocol.sdk import offline
from protocol.sdk.offline import LLM
from tests.support.waiting import HANG_S

def descriptors():
    return set(os.listdir("/proc/self/fd"))

def print_end_of(child):
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

before = descriptors()

def main():
    global llm
    llm = LLM(sys.argv[1], max_slots=2, threads=1)
    print("ready", flush=True)

thread = threading.Thread(target=main)  # it ends, and the processes must not
thread.start()
thread.join()
for line in sys.stdin:
    match line.strip():
        case "generate":
            print("text", llm.generate("w5", max_tokens=3)[0].text, flush=True)
        case "long":
            try:
                print("asking", flush=True)
                llm.generate(["w5"] * 50, max_tokens=3000, ignore_eos=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        case "fail":
            raise SystemExit(3)
        case "fork and exit":
            offline.STOP_S = 5 * HANG_S  # longer than the test waits
            child = os.fork()
            if child == 0:
                sys.exit(7)
            print_end_of(child)
        case "fork and leave":
            offline.STOP_S = 5 * HANG_S
            child = os.fork()
            if child == 0:
                with llm:
                    pass
                os._exit(8 if descriptors() == before else 1)
            print_end_of(child)
        case "close":
            llm.close()
            llm.close()
            print("closed", flush=True)
        case "forget":
            del llm
            gc.collect()
            print("forgotten", flush=True)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The directory for the temporary files of a script. Its path is short, as sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def script(model: Path, temporary: Path) -> Iterator[Program]:
    arguments = ["-P", "-c", textwrap.dedent(SCRIPT), str(model)]
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    program = Program(arguments, environment=environment, has_stdin=True)
    with program:
        program.line_with("ready")
        program.send_line("generate")
        program.line_with("text ")
        yield program


def files_in(temporary: Path) -> list[str]:
    """Return the names of all sockets and files that lie in the directory of temporary files."""
    return sorted(path.name for path in temporary.rglob("*") if not path.is_dir())


def leaves_nothing(temporary: Path) -> bool:
    """Return whether no file and no directory of an LLM is left, except their common parent."""
    return eventually(lambda: not list(temporary.glob("*/*")))


def family_of(program: Program) -> list[int]:
    family = [pid for pid, _ in descendants_of(program.process.pid)]
    assert len(family) >= 4, "the starter, the text process, the engine and its worker"
    return family


def all_ended(pids: list[int]) -> bool:
    return eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("order", "answer"), [("close", "closed"), ("forget", "forgotten")])
def test_close_and_garbage_collection_end_the_processes(
    script: Program, temporary: Path, order: str, answer: str
) -> None:
    family = family_of(script)
    assert "engine.sock" in files_in(temporary)
    script.send_line(order)
    script.line_with(answer)
    assert all_ended(family)
    assert leaves_nothing(temporary)


@pytest.mark.parametrize("order", ["fail", "end"])
def test_the_processes_end_with_the_script(script: Program, temporary: Path, order: str) -> None:
    family = family_of(script)
    if order == "fail":
        script.send_line(order)
    else:
        script.end_input()
    assert script.end() == (3 if order == "fail" else 0)
    assert all_ended(family)
    assert leaves_nothing(temporary)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_processes_end_if_a_signal_ends_the_script(
    script: Program, temporary: Path, number: signal.Signals
) -> None:
    family = family_of(script)
    script.send_line("long")
    script.line_with("asking")
    script.signal(number)
    assert script.end() == -number
    assert all_ended(family)
    assert leaves_nothing(temporary)


def test_the_next_llm_removes_the_directory_of_one_whose_processes_were_all_killed(
    model: Path, script: Program, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(script)
    script.process.send_signal(signal.SIGSTOP)  # it does not see that the others end
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    script.process.kill()
    assert all_ended(family)
    assert "engine.sock" in files_in(temporary)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(temporary))
    with LLM(str(model), **OPTIONS):
        assert files_in(temporary).count("engine.sock") == 1
    assert leaves_nothing(temporary)


def test_an_interrupted_call_aborts_its_requests_and_the_llm_can_be_used_again(
    script: Program,
) -> None:
    script.send_line("long")
    script.line_with("asking")
    script.signal(signal.SIGINT)
    script.line_with("interrupted")
    script.send_line("generate")
    assert eventually(lambda: sum(line.startswith("text ") for line in script.out) == 2)


class Interrupted(Exception):
    """Raised by a signal handler, like KeyboardInterrupt."""


def test_a_call_can_be_interrupted_at_any_moment(llm: LLM) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    dice, num_interrupted = random.Random(0), 0
    expected = [r.text for r in llm.generate(["w5", "w6"], max_tokens=3, temperature=0)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.00002, 0.0015))
                llm.generate(["w5 " * 3000] * 20, max_tokens=100, ignore_eos=True)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                num_interrupted += 1
                results = llm.generate(["w5", "w6"], max_tokens=3, temperature=0)
                assert [r.text for r in results] == expected
    finally:
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > 100


@pytest.mark.parametrize("victim", ["engine_core", "gateway.offline", "tools.offline"])
def test_the_loss_of_a_process_is_an_error_and_ends_the_others(
    script: Program, victim: str
) -> None:
    family = descendants_of(script.process.pid)
    script.send_line("long")
    script.line_with("asking")
    pid = next(pid for pid, line in family if f"-m {victim}" in line)
    os.kill(pid, signal.SIGKILL)
    assert "EngineLost" in script.line_with("Lost")
    assert all_ended([pid for pid, _ in family])


def test_a_forked_process_needs_an_llm_of_its_own(llm: LLM) -> None:
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            llm.generate("w5")
        except EngineError as error:
            os._exit(7 if "belongs to another process" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate("w5", max_tokens=2, ignore_eos=True)[0].text


@pytest.mark.parametrize(("order", "code"), [("fork and exit", 7), ("fork and leave", 8)])
def test_the_end_of_a_forked_process_does_not_end_the_llm(
    script: Program, temporary: Path, order: str, code: int
) -> None:
    family = family_of(script)
    script.send_line(order)
    script.line_with(f"child {code}")
    script.send_line("generate")
    assert eventually(lambda: sum(line.startswith("text ") for line in script.out) == 2)
    assert family_of(script) == family
    script.end_input()
    assert script.end() == 0
    assert all_ended(family)
    assert leaves_nothing(temporary)


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), **OPTIONS)
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed") as refused:
        llm.generate("w5")
    assert not isinstance(refused.value, EngineLost)
