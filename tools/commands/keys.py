"""`tidegate keys`: make, list and revoke the keys of the HTTP API.

The file belongs to its operator, who writes comments and limits into it. So it is changed as text,
and only if what is read from it afterwards is exactly what was meant; it is replaced in one move,
since servers read it at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import msgspec

from protocol import api_keys
from protocol.api_keys import KeyEntry
from tools.failure import Failure
from tools.flags import OneLineParser, add_flags, build

DESCRIPTION = """\
Make, list and revoke the keys of the HTTP API, for `tidegate serve --api-keys FILE`. The file has
digests, not keys: a key is shown once, when it is made. A server that runs reads the file again
within two seconds of a change.
"""

EXAMPLES = """\
examples:
  tidegate keys add keys.toml alice
  tidegate keys add keys.toml bob --requests-per-minute 60 --max-len 4096
  tidegate keys add keys.toml prometheus --scopes metrics
  tidegate keys list keys.toml
  tidegate keys revoke keys.toml alice
"""

NEW_FILE = "# Keys of Tidegate's HTTP API; see docs/security.md and `tidegate keys --help`.\n"
MODE = 0o600
MIN_OWN_LETTERS = 20
"""A key that somebody brings could be guessed if it were shorter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    deeds = parser.add_subparsers(metavar="DEED", required=True, parser_class=OneLineParser)
    adding = deeds.add_parser("add", help="make a key and print it")
    listing = deeds.add_parser("list", help="show the keys' names and what they may do")
    revoking = deeds.add_parser("revoke", help="take a key out")
    for deed in (adding, listing, revoking):
        deed.add_argument("file", metavar="FILE", help="the keys file")
    for deed in (adding, revoking):
        deed.add_argument("name", metavar="NAME", help="whose key: letters, digits, - and _")
    adding.add_argument(
        "--stdin", action="store_true", help="take the key from stdin instead of making one"
    )
    add_flags(adding, KeyEntry, title="the key")
    adding.set_defaults(deed=_add)
    listing.set_defaults(deed=_list)
    revoking.set_defaults(deed=_revoke)


def run(options: argparse.Namespace) -> int:
    path = Path(options.file).expanduser()
    try:
        options.deed(path, options)
    except ValueError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
    return 0


def _add(path: Path, options: argparse.Namespace) -> None:
    key = sys.stdin.readline().strip() if options.stdin else api_keys.new_key()
    api_keys.check_key(key)
    if len(key) < MIN_OWN_LETTERS:
        raise ValueError(f"a key needs at least {MIN_OWN_LETTERS} letters, or it can be guessed")
    entry = build(KeyEntry, vars(options), digest=api_keys.digest_of(key))
    text = api_keys.read_text(str(path)) if path.exists() else NEW_FILE
    write(path, with_key(text, options.name, entry))
    print(f"{options.name} is added; of the key the file has a digest alone", file=sys.stderr)
    if not options.stdin:
        print(key)


def _list(path: Path, options: argparse.Namespace) -> None:
    for name, entry in api_keys.read(str(path)).items():
        told = msgspec.to_builtins(entry)
        limits = [f"{field}={value}" for field, value in told.items() if field not in _NO_LIMITS]
        print(f"{name:<24} {','.join(entry.scopes):<28} {' '.join(limits)}".rstrip())


_NO_LIMITS = {"digest", "scopes"}


def _revoke(path: Path, options: argparse.Namespace) -> None:
    write(path, without_key(api_keys.read_text(str(path)), options.name))
    print(f"{options.name} is revoked", file=sys.stderr)


def with_key(text: str, name: str, entry: KeyEntry) -> str:
    """The file's text with one key more. Raises ValueError where it cannot be added."""
    api_keys.check_name(name)
    keys = api_keys.parse(text)
    if name in keys:
        raise ValueError(f"there is a key {name}; revoke it first")
    fields = msgspec.to_builtins(entry).items()
    table = [f"[keys.{name}]", *(f"{field} = {json.dumps(value)}" for field, value in fields)]
    changed = text.rstrip("\n") + "\n\n" + "\n".join(table) + "\n"
    return _checked(changed, {**keys, name: entry})


def without_key(text: str, name: str) -> str:
    """The file's text without a key; comments stay. Raises ValueError where there is none, or it is
    written in another way than as a table of its own, one line after the other."""
    keys = api_keys.parse(text)
    if keys.pop(name, None) is None:
        raise ValueError(f"there is no key {name}")
    table = re.compile(
        rf"""^\[keys\.{re.escape(name)}\][^\n]*\n  # its head
        (?:[^\n\#\[][^\n]*(?:\n|\Z))*  # the lines behind it: no comment, no other table
        \n?""",
        re.MULTILINE | re.VERBOSE,
    )
    changed = table.sub("", text).rstrip("\n") + "\n"
    return _checked(changed, keys)


def _checked(text: str, keys: dict[str, KeyEntry]) -> str:
    """`text`, if it holds these keys. Raises ValueError."""
    try:
        is_meant = api_keys.parse(text) == keys
    except ValueError:
        is_meant = False
    if not is_meant:
        raise ValueError("this file is written in a way that cannot be changed here; do it by hand")
    return text


def write(path: Path, text: str) -> None:
    """In one move: who reads it meanwhile has the old file or the new one."""
    target = path.resolve()  # a link stays a link
    mode = target.stat().st_mode & 0o777 if target.exists() else MODE
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".keys-", delete=False) as new:
        try:
            os.fchmod(new.fileno(), mode)
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            os.replace(new.name, target)
        except BaseException:
            os.unlink(new.name)
            raise
