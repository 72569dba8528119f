"""The supervisor with real processes: small children, signals, pipes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM
from textwrap import dedent

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.ports import free_port
from tests.support.processes import Program, is_alive
from tests.support.waiting import eventually
from tools.processes.supervisor import SAME_SIGNAL_S

SUPERVISED = str(Path(__file__).parents[1] / "support" / "supervised.py")

GATEWAY = """
import http.server, json, signal, sys
from protocol.process.lifeline import attach_to_parent
attach_to_parent(signal.SIGTERM)
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        ready = self.path != "/readyz" or Handler.asked > 2
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "echo"}]}).encode())
    def log_message(self, *_): pass
def stop(*_):
    print("gateway stops", file=sys.stderr, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
ENGINE = """
import signal, sys, subprocess
from protocol.process.lifeline import attach_to_parent
attach_to_parent(signal.SIGTERM)
helper = subprocess.Popen(["sleep", "1000"])
print("helper", helper.pid, flush=True)
def stop(*_):
    print("engine stops", file=sys.stderr, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.pause()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
BROKEN = "raise RuntimeError('no such model: x')"


def supervised(engine: str = ENGINE, **options: object) -> Program:
    port = free_port()
    gateway = dedent(GATEWAY).replace("PORT", str(port))
    commands = [["gateway", gateway], ["engine", engine]]
    return Program(["-P", SUPERVISED, json.dumps({"port": port, "commands": commands, **options})])


def pids(program: Program) -> list[int]:
    return [int(word) for word in program.line_with("started").split()[1:]]


def helper_of(program: Program) -> int:
    assert eventually(lambda: any("helper" in line for line in program.err))
    return int(next(line for line in program.err if "helper" in line).split()[1])


def test_a_server_reports_its_start_phases_and_a_drain_stops_it_in_order() -> None:
    with supervised() as program:
        assert program.line_with("ready") == "ready echo"
        helper = helper_of(program)
        program.signal(SIGTERM)
        assert program.end() == 0, program.output
        *banner, stopping, stopped = program.out[1:]
        assert banner == ["listening", "ready echo"]
        assert stopping.endswith(" INFO stopping: open requests may finish")
        assert stopped.endswith(" INFO stopped")
        stops = [line for line in program.err if line.endswith("stops")]
        assert stops == ["gateway stops", "engine stops"]
        assert eventually(lambda: not is_alive(helper)), "what the engine had started lives on"


LOGS_WHEN_READY = """
import http.server, signal
from protocol.process.lifeline import attach_to_parent
attach_to_parent(signal.SIGTERM)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "echo"}]}')
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", PORT), Handler)
print("gateway ready", flush=True)
server.serve_forever()
"""


def test_a_line_of_a_child_makes_the_supervisor_look_whether_the_server_is_ready() -> None:
    port = free_port()
    commands = [["gateway", LOGS_WHEN_READY.replace("PORT", str(port))]]
    options = {"port": port, "commands": commands, "probe_every_s": 3600}
    with Program(["-P", SUPERVISED, json.dumps(options)]) as program:
        assert program.line_with("ready echo")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_child_ends_all_others_and_the_cause_is_printed(victim: int) -> None:
    with supervised() as program:
        program.line_with("ready")
        started = [*pids(program), helper_of(program)]
        os.kill(started[victim], SIGKILL)
        assert program.end() == 128 + SIGKILL
        name = ("gateway", "engine")[victim]
        causes = [line for line in program.err if line.startswith("tidegate:")]
        assert len(causes) == 1
        assert causes[0].startswith(f"tidegate: {name} was killed by SIGKILL")
        assert eventually(lambda: not any(map(is_alive, started)))


SURVIVOR = """
import subprocess, sys
code = "import sys, time; sys.stdin.read(); time.sleep(SLEEP_S); print('an error', flush=True)"
helper = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
print("helper", helper.pid, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(("sleep_s", "is_told"), [(0.2, True), (1000, False)])
def test_workers_of_a_dead_gateway_get_time_to_inform_their_clients(
    sleep_s: float, is_told: bool
) -> None:
    port = free_port()
    code = (SURVIVOR + dedent(GATEWAY)).replace("SLEEP_S", str(sleep_s)).replace("PORT", str(port))
    commands = [["gateway", code], ["engine", DEAF]]
    result = {"port": port, "commands": commands, "survivors_s": 30.0 if is_told else 0.1}
    with Program(["-P", SUPERVISED, json.dumps(result)]) as program:
        program.line_with("ready")
        helper = helper_of(program)
        os.kill(pids(program)[0], SIGKILL)
        assert program.end() == 128 + SIGKILL
        assert ("an error" in program.err) == is_told, program.output
        assert eventually(lambda: not is_alive(helper))


OLD_ERROR = """
import signal
print("WARNING answers cannot be constrained: ValueError: an old error", flush=True)
signal.pause()
"""
SAYS_WHY = """
import signal, sys
from protocol.process.lifeline import attach_to_parent
parent = attach_to_parent(signal.SIGTERM)
parent.send_cause("no such device\\nand more")
print("ValueError: printed last", flush=True)
sys.exit(3)
"""


def test_the_cause_of_a_death_by_a_signal_is_the_signal_and_no_line_printed_before_it() -> None:
    with supervised(OLD_ERROR) as program:
        program.line_with("ready")
        assert eventually(lambda: any("an old error" in line for line in program.err))
        os.kill(pids(program)[1], SIGKILL)
        assert program.end() == 128 + SIGKILL
        (cause,) = (line for line in program.err if line.startswith("tidegate:"))
        assert "an old error" not in cause
        assert cause.startswith("tidegate: engine was killed by SIGKILL")


CHATTY = """
import signal, sys
def stop(*_):
    print("a long goodbye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGQUIT, stop)
signal.pause()
"""


def test_the_cause_is_the_last_line_before_the_other_children_stop() -> None:
    with supervised(CHATTY) as program:
        program.line_with("ready")
        os.kill(pids(program)[0], SIGKILL)
        program.end()
        assert "a long goodbye" in program.err
        assert program.err[-1] == "tidegate: gateway was killed by SIGKILL"


def test_the_cause_that_a_child_sends_is_printed_instead_of_its_last_line() -> None:
    with supervised(SAYS_WHY) as program:
        program.end()
        assert "tidegate: engine exited with code 3: no such device" in program.err


def test_a_child_that_fails_to_start_is_reported_with_its_last_error() -> None:
    with supervised(BROKEN) as program:
        assert program.end() == 1
        cause = "tidegate: engine exited with code 1: RuntimeError: no such model: x"
        assert cause in program.err
        assert "Traceback (most recent call last):" in program.err  # passed on as it is


def test_with_json_logs_a_traceback_of_a_child_and_the_cause_are_json_lines() -> None:
    with supervised(BROKEN, log_format="json") as program:
        assert program.end() == 1
        first, *_, last = [json.loads(line) for line in program.err]
        assert first["process"] == f"engine[{pids(program)[1]}]"
        assert first["message"] == "Traceback (most recent call last):"
        assert last["level"] == "ERROR"
        assert last["message"] == "engine exited with code 1: RuntimeError: no such model: x"


def test_a_second_ctrl_c_ends_a_child_that_ignores_the_first() -> None:
    with supervised(DEAF) as program:
        program.line_with("ready")
        program.signal(SIGINT)
        assert eventually(lambda: "gateway stops" in program.err)

        def stops_at_once() -> bool:
            is_over = any("stopping at once" in line for line in program.err)
            if not is_over:
                program.signal(SIGINT)
            return is_over

        # A signal that follows at once counts as the first. One that follows after the end of the
        # children would interrupt the supervisor's last words.
        assert eventually(stops_at_once, every_s=SAME_SIGNAL_S)
        assert program.end() == 128 + SIGINT
        assert program.out[-1].endswith(" INFO stopped")
        assert eventually(lambda: not any(map(is_alive, pids(program))))


def test_a_server_that_never_gets_ready_is_given_up() -> None:
    with supervised(start_timeout_s=0.05) as program:
        assert program.end() == ExitCode.NOT_READY
        assert "tidegate: not ready after 0.05 s; --start-timeout-s allows more" in program.err


def test_a_killed_engine_comes_back_while_the_gateway_serves_on() -> None:
    with supervised(max_restarts=1) as program:
        program.line_with("ready")
        gateway, engine = pids(program)
        helper = helper_of(program)
        os.kill(engine, SIGKILL)
        again = int(program.line_with("engine started again").split()[-1].rstrip(")"))
        program.line_with("ready again")
        assert eventually(lambda: not is_alive(helper)), "what the engine had started lives on"
        assert is_alive(gateway)
        os.kill(again, SIGKILL)
        assert program.end() == 128 + SIGKILL
        assert "1 restart did not help" in program.output


def test_a_stopped_process_that_comes_back_is_killed() -> None:
    with supervised(max_restarts=1) as program:
        program.line_with("ready")
        engine = pids(program)[1]
        os.kill(engine, SIGSTOP)
        program.line_with("engine started again")
        assert not is_alive(engine)
        program.signal(SIGTERM)
        assert program.end() == 0


def test_children_do_not_outlive_a_supervisor_that_was_killed() -> None:
    with supervised() as program:
        program.line_with("ready")
        started = pids(program)
        program.signal(SIGKILL)
        assert eventually(lambda: not any(map(is_alive, started)))
