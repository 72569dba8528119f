"""`tidegate keys`: adds, lists and revokes API keys.

Operators also edit the keys file by hand, for example to add comments and limits. So this module
changes the file as text, and then checks that the new text contains exactly the intended keys. It
replaces the file atomically, because a server may read the file at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import msgspec

from protocol.shared import api_keys
from protocol.shared.api_keys import KeyEntry
from tools.failure import Failure
from tools.flags import OneLineParser, add_flags, build
from tools.paths import user_path

DESCRIPTION = """\
Add, list and revoke API keys, for `tidegate serve --api-keys FILE`. The file contains digests, not
keys: a key is printed once, when it is created. A running server reloads the file within two
seconds of a change.
"""

EXAMPLES = """\
examples:
  tidegate keys add keys.toml alice
  tidegate keys add keys.toml bob --requests-per-minute 60 --max-len 4096
  tidegate keys add keys.toml prometheus --scopes metrics
  tidegate keys list keys.toml
  tidegate keys revoke keys.toml alice
"""

NEW_FILE = (
    "# Keys of Tidegate's HTTP API; see docs/operate/security.md and `tidegate keys --help`.\n"
)
MODE = 0o600
MIN_OWN_LETTERS = 20
"""The minimum length of a key from --stdin. A shorter one could be guessed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=OneLineParser
    )
    adding, listing, revoking = (
        actions.add_parser(name, help=about, description=f"{about.capitalize()}.")
        for name, about in (
            ("add", "create a key and print it"),
            ("list", "list the keys with their scopes and limits"),
            ("revoke", "remove a key"),
        )
    )
    for action in (adding, listing, revoking):
        action.add_argument("file", metavar="FILE", help="the keys file")
    for action, metavar in ((adding, "NAME"), (revoking, "KEY_NAME")):
        action.add_argument(
            "name", metavar=metavar, help="name of the key: letters, digits, - and _"
        )
    adding.add_argument(
        "--stdin", action="store_true", help="read the key from stdin instead of creating one"
    )
    add_flags(adding, KeyEntry, title="the key")
    adding.set_defaults(action=_add)
    listing.set_defaults(action=_list)
    revoking.set_defaults(action=_revoke)


def run(options: argparse.Namespace) -> int:
    path = user_path(options.file)
    try:
        options.action(path, options)
    except ValueError as error:
        text = str(error)
        raise Failure(text if text.startswith(f"{path}:") else f"{path}: {text}") from None
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
    return 0


def _add(path: Path, options: argparse.Namespace) -> None:
    key = sys.stdin.readline().strip() if options.stdin else api_keys.new_key()
    api_keys.check_key(key)
    if len(key) < MIN_OWN_LETTERS:
        raise ValueError(
            f"the key has {len(key)} characters; at least {MIN_OWN_LETTERS} are required, or it "
            "could be guessed"
        )
    entry = build(KeyEntry, vars(options), digest=api_keys.digest_of(key))
    text = api_keys.read_text(str(path)) if path.exists() else NEW_FILE
    write(path, with_key(text, options.name, entry))
    print(f"added {options.name}; the file contains only a digest of the key", file=sys.stderr)
    if not options.stdin:
        print(key)


def _list(path: Path, options: argparse.Namespace) -> None:
    for name, entry in api_keys.read(str(path)).items():
        fields = msgspec.to_builtins(entry)
        limits = [f"{field}={value}" for field, value in fields.items() if field not in _NO_LIMITS]
        print(f"{name:<24} {','.join(entry.scopes):<28} {' '.join(limits)}".rstrip())


_NO_LIMITS = {"digest", "scopes"}


def _revoke(path: Path, options: argparse.Namespace) -> None:
    write(path, without_key(api_keys.read_text(str(path)), options.name))
    print(f"revoked {options.name}", file=sys.stderr)


def with_key(text: str, name: str, entry: KeyEntry) -> str:
    """Return the text of a keys file, with the key `name` added.

    Raises ValueError if there is a key with this name, or if the name is not allowed.
    """
    api_keys.check_name(name)
    keys = api_keys.parse(text)
    if name in keys:
        raise ValueError(f"the key {name} already exists; revoke it first")
    fields = msgspec.to_builtins(entry).items()
    table = [f"[keys.{name}]", *(f"{field} = {json.dumps(value)}" for field, value in fields)]
    changed = text.rstrip("\n") + "\n\n" + "\n".join(table) + "\n"
    return _checked(changed, {**keys, name: entry})


def without_key(text: str, name: str) -> str:
    """Return the text of a keys file, with the key `name` removed. Comments stay.

    Raises ValueError if there is no such key, or if the key is not written as a table of its own
    with one line per field.
    """
    keys = api_keys.parse(text)
    if keys.pop(name, None) is None:
        raise ValueError(f"no key is named {name}")
    table = re.compile(
        rf"""^\[keys\.{re.escape(name)}\][^\n]*\n  # the table's header
        (?:[^\n\#\[][^\n]*(?:\n|\Z))*  # the lines after it, up to a comment or another table
        \n?""",
        re.MULTILINE | re.VERBOSE,
    )
    changed = table.sub("", text).rstrip("\n") + "\n"
    return _checked(changed, keys)


def _checked(text: str, keys: dict[str, KeyEntry]) -> str:
    """Return `text` if it contains exactly `keys`. Otherwise raise ValueError."""
    try:
        is_correct = api_keys.parse(text) == keys
    except ValueError:
        is_correct = False
    if not is_correct:
        raise ValueError("cannot change this file because of how it is written; edit it by hand")
    return text


def write(path: Path, text: str) -> None:
    """Replace the file atomically: a reader gets either the old text or the new one."""
    target = path.resolve()  # replace the target of a symbolic link, not the link
    mode = target.stat().st_mode & 0o777 if target.exists() else MODE
    with (
        tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".keys-", delete=False) as new,
        contextlib.ExitStack() as on_failure,
    ):
        on_failure.callback(os.unlink, new.name)
        os.fchmod(new.fileno(), mode)
        new.write(text)
        new.flush()
        os.fsync(new.fileno())
        os.replace(new.name, target)
        on_failure.pop_all()
