"""Chat templates in processes with limits. The model's template is rendered while the template of
a request computes, and no template is lost if its process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gevent
import pytest

from gateway.prompt.template import ChatTemplate, ParsedTemplate
from gateway.prompt.written import WrittenTurns
from gateway.sandbox.clients import MAX_WAITING, SandboxedTemplate, TemplateProcesses
from gateway.sandbox.messages import LoadTemplate, TemplateLoaded
from gateway.sandbox.process import MODULE, SMALL_BYTES, LimitExceeded, SandboxPool, SandboxProcess
from protocol.wire.errors import InvalidRequest, Overloaded
from tests.support.gateway_process import GatewayProcess
from tests.support.hostile_templates import LARGE, REFUSED, SLOW
from tests.support.http import error_of
from tests.support.processes import descendants_of, is_alive
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ENDLESS = SLOW["loops within loops"]
LITTLE_CPU_S = 0.2


@pytest.fixture
def templates() -> Iterator[TemplateProcesses]:
    with closing(TemplateProcesses()) as processes:
        processes.start()
        yield processes


@pytest.fixture(scope="module")
def limited() -> Iterator[SandboxProcess]:
    """Yield a process for hostile templates, with a shorter time limit than usual."""
    with closing(SandboxProcess(cpu_s=LITTLE_CPU_S)) as process:
        yield process


@pytest.fixture(scope="module")
def lasting() -> Iterator[SandboxProcess]:
    """Yield a process with the usual limits, for templates that do not end it."""
    with closing(SandboxProcess()) as process:
        yield process


@pytest.fixture
def usual() -> Iterator[SandboxProcess]:
    with closing(SandboxProcess()) as process:
        yield process


def rendered(template: ParsedTemplate, messages: Any = USER) -> str:
    return template.render(messages)


@pytest.mark.parametrize("name", [*SLOW, *LARGE])
def test_a_template_that_goes_beyond_its_limits_is_refused(
    limited: SandboxProcess, name: str
) -> None:
    with pytest.raises(ValueError, match=r"too much (time|memory)"):
        SandboxedTemplate(limited, (SLOW | LARGE)[name], {})
    assert rendered(SandboxedTemplate(limited, PLAIN, {})) == "<user>hi"


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_fails_is_refused_and_its_process_goes_on(
    lasting: SandboxProcess, name: str
) -> None:
    lasting.start()
    before = lasting.pid
    with pytest.raises((ValueError, InvalidRequest)) as caught:
        rendered(SandboxedTemplate(lasting, REFUSED[name], {}))
    assert len(str(caught.value)) < 2_000
    assert rendered(SandboxedTemplate(lasting, PLAIN, {})) == "<user>hi"
    assert lasting.pid == before


def test_a_message_that_makes_a_template_slow_is_refused_by_its_field(
    limited: SandboxProcess,
) -> None:
    source = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}" + PLAIN
    template = SandboxedTemplate(limited, source, {})
    with pytest.raises(InvalidRequest, match="too much time") as caught:
        template.render([{"role": "user", "content": "slow"}], param="input")
    assert caught.value.param == "input"
    assert rendered(template) == "<user>hi"


def test_the_model_s_template_is_rendered_while_a_request_s_template_computes(
    templates: TemplateProcesses,
) -> None:
    own = templates.load(PLAIN, {})
    attack = gevent.spawn(_refusal, templates, ENDLESS)
    count = 0
    while not attack.ready():
        assert rendered(own) == "<user>hi"
        count += 1
    assert isinstance(attack.value, ValueError)
    assert count >= 10


def test_a_small_conversation_is_rendered_while_a_large_one_computes() -> None:
    with closing(SandboxPool(SandboxProcess(cpu_s=30), SandboxProcess())) as pool:
        template = SandboxedTemplate(pool, PLAIN, {})
        assert isinstance(pool.first, SandboxProcess)
        stopped = pool.first.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        long = "x" * (SMALL_BYTES + 1)
        large = gevent.spawn(rendered, template, [{"role": "user", "content": long}])
        gevent.sleep(0)  # it is sent
        assert [rendered(template) for _ in range(3)] == ["<user>hi"] * 3
        assert not large.ready()
        os.kill(stopped, signal.SIGCONT)
        assert large.get() == "<user>" + long


def _refusal(templates: TemplateProcesses, source: str) -> Exception | None:
    try:
        templates.load_foreign(source, {})
    except (ValueError, Overloaded) as error:
        return error
    return None


def test_at_most_max_waiting_templates_of_requests_wait() -> None:
    with closing(SandboxProcess(cpu_s=LITTLE_CPU_S, max_waiting=2)) as process:
        asked = [gevent.spawn(_outcome, process, ENDLESS) for _ in range(4)]
        gevent.joinall(asked)
        assert [type(each.value) for each in asked] == [*[LimitExceeded] * 2, *[Overloaded] * 2]
        assert isinstance(_outcome(process, PLAIN), TemplateLoaded)
    assert MAX_WAITING > 2


def _outcome(process: SandboxProcess, source: str) -> object:
    try:
        return process.call(LoadTemplate(source, {}))
    except (LimitExceeded, Overloaded) as error:
        return error


def test_a_template_that_waits_for_a_killed_process_is_rendered_by_the_next(
    templates: TemplateProcesses,
) -> None:
    with closing(SandboxProcess(cpu_s=30)) as process:
        template = SandboxedTemplate(process, PLAIN, {})
        killed = process.pid
        assert killed is not None
        os.kill(killed, signal.SIGSTOP)
        asked = [gevent.spawn(rendered, template) for _ in range(5)]
        gevent.sleep(0)  # the first is sent, the others wait for their turn
        os.kill(killed, signal.SIGKILL)
        gevent.joinall(asked, raise_error=True)
        assert [each.value for each in asked] == ["<user>hi"] * 5
        assert process.pid != killed


def test_a_process_that_hangs_is_replaced() -> None:
    with closing(SandboxProcess(wall_s=10)) as process:
        template = SandboxedTemplate(process, PLAIN, {})
        process.wall_s = 0.2
        stopped = process.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match="longer than"):
            rendered(template)
        process.wall_s = 10
        assert rendered(template) == "<user>hi"
        assert eventually(lambda: not is_alive(stopped))


def test_signals_for_the_whole_group_do_not_end_it(limited: SandboxProcess) -> None:
    template = SandboxedTemplate(limited, PLAIN, {})
    before = limited.pid
    assert before is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(before, number)
    assert rendered(template) == "<user>hi"
    assert limited.pid == before


def test_a_process_that_has_grown_is_replaced_and_its_reply_is_kept(usual: SandboxProcess) -> None:
    template = SandboxedTemplate(usual, PLAIN, {})
    before = usual.pid
    keeps_much = "{% set x = '" + "é" * 9_000_000 + "' %}"
    grown = [
        SandboxedTemplate(usual, keeps_much + f"{{# {i} #}}{{{{ x[0] }}}}", {}) for i in "1234"
    ]
    assert [rendered(each) for each in grown] == ["é"] * 4
    assert usual.pid != before
    assert rendered(template) == "<user>hi"


def test_a_long_prompt_comes_back_whole(usual: SandboxProcess) -> None:
    template = SandboxedTemplate(usual, PLAIN, {})
    long = "\U0001f600\n" * 4_000_000
    assert rendered(template, [{"role": "user", "content": long}]) == "<user>" + long


def test_a_prompt_that_is_too_long_is_refused(limited: SandboxProcess) -> None:
    template = SandboxedTemplate(limited, "{{ messages[0].content * 20 }}", {})
    with pytest.raises(InvalidRequest, match="more than 16,000,000 characters"):
        rendered(template, [{"role": "user", "content": "x" * 1_000_000}])


def test_a_sandboxed_template_renders_like_a_local_one(limited: SandboxProcess) -> None:
    values = [{"a": 10**30, "b": -(2**63), "c": 1.0, "d": 1e22, "é": "\u2028\U0001f600\x00\n"}, []]
    source = "{{ messages }}{{ messages | tojson }}{{ tools is none }}{{ bos_token }}{{ x }}"
    here, there = (
        ChatTemplate(source, {"bos_token": "<s>"}),
        SandboxedTemplate(limited, source, {"bos_token": "<s>"}),
    )
    for messages in (values, USER):
        kwargs = {"x": messages, "bos_token": "<t>"}
        texts = [each.render(messages, kwargs=kwargs) for each in (here, there)]  # type: ignore[arg-type]
        assert texts[0] == texts[1]
    assert there.traits == here.traits
    assert there.profile == here.profile
    assert there.written == here.written


def test_what_a_template_writes_is_found_in_its_process(limited: SandboxProcess) -> None:
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
    source = PLAIN.replace("{% endfor %}", calls + "{% endfor %}")
    written = SandboxedTemplate(limited, source, {}).written
    assert written == ChatTemplate(source).written
    assert written.calls is not None


@pytest.mark.parametrize(
    "answer",
    [ENDLESS, LARGE["a constant text"], "{{ '%c' % 55296 }}"],
    ids=["time", "memory", "half of a surrogate pair"],
)
def test_nothing_is_written_if_the_rendering_fails(limited: SandboxProcess, answer: str) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        f"{{% if call.function.name == 'find_pl4ce' %}}{answer}{{% endif %}}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    template = SandboxedTemplate(limited, source, {})
    assert template.written == WrittenTurns()
    assert rendered(template, USER) == "hi"


def test_a_sandbox_inherits_no_secrets_and_no_open_files(
    limited: SandboxProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_API_KEY", "sk-secret")
    limited.call(LoadTemplate(PLAIN, {}))
    own = Path(f"/proc/{limited.pid}")
    assert b"TIDEGATE" not in (own / "environ").read_bytes()
    descriptors = sorted(int(each.name) for each in (own / "fd").iterdir())
    assert descriptors == [0, 1, 2, 3]  # 3: how much memory it has


def test_a_sandbox_does_not_outlive_its_gateway(tmp_path: Path) -> None:
    with (
        ScriptedEngine(f"ipc://{tmp_path / 'engine.sock'}") as engine,
        GatewayProcess(engine=engine.address) as gateway,
    ):
        gateway.await_ready()
        family = descendants_of(gateway.process.pid)
        (limited,) = [pid for pid, line in family if MODULE in line]
        (parent,) = [pid for pid, line in family if "gunicorn" in line]
        os.kill(parent, signal.SIGKILL)
        assert eventually(lambda: not is_alive(limited))
        gateway.await_ready()  # gunicorn has started another


def test_a_hostile_template_of_a_request_is_a_400_that_names_it(tmp_path: Path) -> None:
    with (
        ScriptedEngine(f"ipc://{tmp_path / 'engine.sock'}") as engine,
        GatewayProcess(engine=engine.address, trust_request_chat_template=True) as gateway,
    ):
        gateway.await_ready()
        for source in (ENDLESS, LARGE["a constant text"], REFUSED["deep loops"]):
            response = gateway.post("/tokenize", {"messages": USER, "chat_template": source})
            assert error_of(response, 400)["param"] == "chat_template"
        limited = {pid for pid, line in descendants_of(gateway.process.pid) if MODULE in line}
        assert len(limited) == 2
        asked = {"messages": USER, "chat_template": PLAIN}
        assert gateway.post("/tokenize", asked).status_code == 200
        assert gateway.post("/tokenize", {"messages": USER}).status_code == 200
        found = {pid for pid, line in descendants_of(gateway.process.pid) if MODULE in line}
        assert found == limited, "none ends without a cause"
