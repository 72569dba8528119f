"""A port has one server, and the holder of a used port is named."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.process.exit_codes import ExitCode
from protocol.sdk.client import Client
from protocol.wire.sockets import (
    MEETING_FILE,
    checked_engine_address,
    engine_address,
    run_directory,
)
from tools.failure import Failure
from tools.processes import discovery, run_lock
from tools.processes.run_lock import (
    LOCK,
    METRICS,
    RUN_KEY,
    LockFacts,
    check_port_is_free,
    describe,
    facts,
    hold,
    holder,
    holding,
)

HOLD = """
import sys
from pathlib import Path
from tools.processes.run_lock import hold
hold(Path(sys.argv[1]))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "8000"


def test_a_run_directory_is_private_and_names_its_holder(directory: Path) -> None:
    lock = hold(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert holder(directory) == os.getpid()
    os.close(lock)
    assert holder(directory) is None


def test_a_second_server_is_refused_and_shown_the_holder(directory: Path) -> None:
    lock = hold(directory)
    second = subprocess.run(
        [sys.executable, "-c", HOLD, str(directory)], capture_output=True, text=True
    )
    assert second.returncode == 1
    assert f"already runs on port 8000: process {os.getpid()}" in second.stderr
    os.close(lock)
    os.close(hold(directory))  # free again


def leave(directory: Path) -> None:
    """Create the leftovers of a server that was killed."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory / "e.sock"))
    (directory / METRICS).mkdir()
    (directory / METRICS / "counter_1.db").touch()
    (directory / RUN_KEY).touch()
    (directory / f"{MEETING_FILE}7-0a1b").touch()


def test_a_run_that_ends_leaves_nothing_behind(directory: Path) -> None:
    with holding(directory):
        leave(directory)
    assert list(directory.parent.iterdir()) == []
    with contextlib.suppress(Failure), holding(directory):
        leave(directory)
        raise Failure("there is no such model")
    assert list(directory.parent.iterdir()) == []


def test_a_start_removes_only_the_leftovers_of_killed_servers(directory: Path) -> None:
    killed, runs, foreign = (directory.parent / name for name in ("8001", "8002", "devices"))
    for each in (directory, killed, runs):
        os.close(hold(each))
        leave(each)
    (directory / "notes").touch()
    lock = hold(runs)
    foreign.mkdir()
    (foreign / "cuda-0").touch()
    before = sorted(path.name for path in runs.iterdir())
    with holding(directory):
        assert sorted(path.name for path in directory.iterdir()) == ["notes", LOCK]
        assert not killed.exists()
        assert sorted(path.name for path in runs.iterdir()) == before
        assert (foreign / "cuda-0").exists()
    assert [path.name for path in directory.iterdir()] == ["notes"]
    os.close(lock)


def test_a_lock_file_that_was_removed_meanwhile_is_not_taken(directory: Path) -> None:
    lock = hold(directory)
    (directory / LOCK).unlink()
    second = hold(directory)
    os.close(lock)
    with pytest.raises(Failure, match="already runs"):
        hold(directory)
    os.close(second)


def test_children_that_still_stop_keep_the_directory_taken(directory: Path) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path;"
        "from tools.processes.run_lock import hold;"
        "lock = hold(Path(sys.argv[1]));"
        "print(subprocess.Popen(['sleep', '1000'], pass_fds=[lock], stdout=2).pid)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True
    )
    with pytest.raises(Failure, match="is gone, but its children are still stopping"):
        hold(directory)
    os.kill(int(ran.stdout), 9)


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    with pytest.raises(Failure, match="only its owner can enter"):
        hold(directory)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of this user elsewhere, with the files of a server that was killed."""
    victim = tmp_path / "elsewhere" / "8000"
    os.close(hold(victim))
    leave(victim)
    return victim


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def open_to_others(base: Path) -> None:
    base.chmod(0o777)


def give_away(base: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to another user")
    os.chown(base, os.getuid() + 1, -1)


def replace_with_link(base: Path) -> None:
    base.rename(base.with_name("real"))
    base.symlink_to("real")


@pytest.mark.parametrize("spoil", [open_to_others, give_away, replace_with_link])
def test_nothing_in_a_base_that_others_can_change_is_removed(
    directory: Path, victim: Path, spoil: Callable[[Path], None]
) -> None:
    """The other user has put a link to a directory of this user there."""
    base = directory.parent
    base.mkdir(mode=0o700)
    (base / "link").symlink_to(victim)
    killed = base / "8001"
    os.close(hold(killed))
    leave(killed)
    spoil(base)
    before = files_in(victim), files_in(killed)
    with (
        pytest.raises(Failure, match="run must be a directory that only its owner can enter"),
        holding(directory),
    ):
        pytest.fail("the directory is held")
    assert (files_in(victim), files_in(killed)) == before


def test_links_in_a_private_base_are_not_followed(directory: Path, victim: Path) -> None:
    directory.parent.mkdir(mode=0o700)
    (directory.parent / "link").symlink_to(victim)
    before = files_in(victim)
    with holding(directory):
        assert files_in(victim) == before
    with pytest.raises(Failure, match="link must be a directory"):
        hold(directory.parent / "link")


def test_a_server_that_ends_while_servers_are_listed_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidegate ps` ended with a traceback if a server removed its run directory meanwhile."""
    lock, other = hold(directory), hold(directory.parent / "8001")
    listed = run_lock.run_directories

    def list_and_end(base: Path) -> list[Path]:
        found = listed(base)
        run_lock.remove(directory)
        return found

    monkeypatch.setattr(run_lock, "run_directories", list_and_end)
    found = discovery.discover(directory.parent).run_directories
    assert [each.name for each in found] == ["8001"]
    for each in (lock, other):
        os.close(each)


@pytest.mark.parametrize("spoil", [open_to_others, give_away, replace_with_link])
def test_a_server_in_a_base_that_others_can_change_is_not_found(
    directory: Path, spoil: Callable[[Path], None]
) -> None:
    """Another user could write another URL there, to get this user's prompts."""
    lock = hold(directory)
    describe(lock, LockFacts(url="http://192.0.2.1:8000"))
    assert [server.port for server in discovery.running(directory.parent)] == [8000]
    spoil(directory.parent)
    assert holder(directory) is None
    assert facts(directory) == LockFacts()
    assert discovery.running(directory.parent) == []
    assert discovery.discover(directory.parent).run_directories == []
    os.close(lock)


@pytest.mark.parametrize("spoil", [open_to_others, give_away, replace_with_link])
def test_a_client_does_not_connect_where_another_user_may_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert checked_engine_address() == engine_address()
    base = run_directory(8000).parent
    base.mkdir(mode=0o700)
    assert checked_engine_address() == engine_address()
    spoil(base)
    with pytest.raises(PermissionError, match="must be a directory that only its owner can enter"):
        Client()


def test_the_holder_of_a_used_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Failure, match=rf"port {port} is in use by pid {os.getpid()} "):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(Failure, match=r"cannot listen on 192\.0\.2\.1:8000") as refused:
        check_port_is_free("192.0.2.1", 8000)
    assert refused.value.exit_code == ExitCode.IN_USE
