"""The keys file: how it is read and changed."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from protocol.shared import api_keys
from protocol.shared.api_keys import KeyEntry, digest_of, new_key, parse
from tools.__main__ import main
from tools.commands.keys import with_key, without_key

A, B = digest_of("a" * 30), digest_of("b" * 30)
FILE = f"""\
# ours
[keys.alice]
digest = "{A}"
scopes = ["inference", "admin"]
max_n = 4

# bob pays late
[keys.bob]  # the other one
digest = "{B}"
"""


def test_a_table_is_a_key():
    keys = parse(FILE)
    assert keys["alice"] == KeyEntry(digest=A, scopes=["inference", "admin"], max_n=4)
    assert keys["bob"] == KeyEntry(digest=B, scopes=["inference"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys", "after a key"),
        ("[keys.alice]", "digest"),
        ('[keys.alice]\ndigest = "abc"', "digest"),
        (f'[keys.alice]\ndigest = "{A.upper()}"', "digest"),
        (f'[keys."al ice"]\ndigest = "{A}"', "regex"),
        (f'[keys.alice]\ndigest = "{A}"\nscopes = []', "scopes"),
        (f'[keys.alice]\ndigest = "{A}"\nscopes = ["root"]', "root"),
        (f'[keys.alice]\ndigest = "{A}"\nmax_m = 4', "max_m"),
        (f'[keys.alice]\ndigest = "{A}"\nmax_n = -4', "max_n"),
        (f'[keys.alice]\ndigest = "{A}"\npriority = 1', "priority"),
        (f'[keys.alice]\ndigest = "{A}"\n[keys.bob]\ndigest = "{A}"', "alice and bob"),
        ("[key.alice]", "key"),
    ],
)
def test_an_error_in_the_keys_file_is_reported_in_one_line(text: str, says: str):
    with pytest.raises(ValueError, match=says) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_keys_are_long_random_and_known_by_their_prefix():
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("tg-") and len(key) == 46 for key in made)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o644)
    assert set(api_keys.read(str(path))) == {"alice", "bob"}
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod go-w"):
            api_keys.read(str(path))


@pytest.mark.parametrize("content", [b"\xff", b"#" * (api_keys.MAX_FILE_BYTES + 1)])
def test_a_file_that_is_no_keys_file_is_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / "keys.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"keys\.toml: "):
        api_keys.read(str(path))


def test_a_revoked_key_takes_only_its_own_lines():
    rest = FILE[FILE.index("# bob") :]
    assert without_key(FILE, "alice") == f"# ours\n{rest}"
    assert parse(without_key(FILE, "bob")) == {"alice": parse(FILE)["alice"]}


@pytest.mark.parametrize(
    "text",
    [
        f'keys.alice.digest = "{A}"\n',
        f'[keys]\nalice = {{digest = "{A}"}}\n',
        f'[keys.alice]\ndigest = "{A}"\n\nmax_n = 4\n',
    ],
)
def test_a_key_that_is_written_in_another_way_is_left_to_its_operator(text: str):
    assert set(parse(text)) == {"alice"}
    with pytest.raises(ValueError, match="by hand"):
        without_key(text, "alice")


def test_an_added_key_has_the_given_limits_and_the_rest_of_the_file_is_unchanged():
    entry = KeyEntry(digest=digest_of("c" * 30), scopes=["metrics"], priority=-3, namespace="us")
    changed = with_key(FILE, "carol", entry)
    assert changed.startswith(FILE)
    assert parse(changed) == {**parse(FILE), "carol": entry}
    with pytest.raises(ValueError, match="the key bob already exists"):
        with_key(FILE, "bob", entry)
    with pytest.raises(ValueError, match="a name is"):
        with_key(FILE, "x]\n[keys.y", entry)


def test_the_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "keys.toml")
    assert main(["keys", "add", path, "alice", "--requests-per-minute", "60"]) == 0
    key = capsys.readouterr().out.strip()
    assert api_keys.read(path)["alice"] == KeyEntry(digest=digest_of(key), requests_per_minute=60)
    assert key not in Path(path).read_text()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert main(["keys", "list", path]) == 0
    assert capsys.readouterr().out.split() == ["alice", "inference", "requests_per_minute=60"]
    assert main(["keys", "revoke", path, "alice"]) == 0
    assert api_keys.read(path) == {}
    capsys.readouterr()
    assert main(["keys", "revoke", path, "alice"]) == 1
    assert f"{path}: no key is named alice" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["keys.toml"], "no draft is left behind"


@pytest.mark.parametrize("content", [b"not = [toml", b"[keys.a]\nnosuch = 1\n", b"\xff"])
@pytest.mark.parametrize("words", [("add", "FILE", "b"), ("list", "FILE"), ("revoke", "FILE", "a")])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: tuple[str, ...]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    assert main(["keys", *(str(file) if word == "FILE" else word for word in words)]) == 1
    assert capsys.readouterr().err.startswith(f"tidegate: {file}: ")


def test_a_key_from_stdin_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path, key = str(tmp_path / "keys.toml"), "sk-" + "x" * 40
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert main(["keys", "add", path, "alice", "--stdin"]) == 0
    assert key not in "".join(capsys.readouterr())
    assert api_keys.read(path)["alice"].digest == digest_of(key)
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert main(["keys", "add", path, "bob", "--stdin"]) == 1


def test_a_link_to_the_file_stays_a_link(tmp_path: Path):
    real, link = tmp_path / "real.toml", tmp_path / "keys.toml"
    real.write_text("")
    real.chmod(0o640)
    link.symlink_to(real)
    assert main(["keys", "add", str(link), "alice"]) == 0
    assert link.is_symlink()
    assert set(api_keys.read(str(real))) == {"alice"}
    assert real.stat().st_mode & 0o777 == 0o640
