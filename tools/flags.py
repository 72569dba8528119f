"""Command-line options generated from the config structs: names, bounds, defaults and help.

A field is declared once, in `protocol.config`. This module turns the field into an option, and the
text that a user gives for the option into a checked value:

- Every field becomes an option, except `wiring` fields: code sets these, to connect processes.
- `max_slots: int` becomes `--max-slots N`. A bool that is True by default becomes `--no-x`; its
  opposite `--x` is not in the help, and overrides a file of --config (`tools.config_file`). A list
  becomes an option that may be repeated, a tuple of numbers an option with a comma-separated value.
- msgspec checks the bounds, and this module describes them in the help. The error for a bad value
  is one line, with the option and the values that it accepts.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, get_args

import msgspec
from msgspec import NODEFAULT, inspect

from protocol.config.base import PathKind
from tools.other_servers import OPTIONS, advice

C = TypeVar("C", bound=msgspec.Struct)

KINDS: dict[type[inspect.Type], tuple[str, str]] = {
    inspect.IntType: ("N", "a whole number"),
    inspect.FloatType: ("X", "a number"),
    inspect.StrType: ("TEXT", "text"),
}
"""Type of a value -> its name in the usage, and in error messages."""
NOUNS = {
    "file": "FILE",
    "directory": "DIRECTORY",
    "address": "ADDRESS",
    "URL": "URL",
    "JSON": "JSON",
}
"""First word of a text field's description -> the name of the value in the usage."""
ALL = "all"
"""The value of --help with which it shows all options."""
MAX_OPTIONS_IN_USAGE = 12
"""A command with more options has no list of them in its usage."""
UNITS = {"s": "SECONDS", "ms": "MILLISECONDS", "days": "DAYS", "mib": "MIB", "gib": "GIB"}
"""Last word of a number's field -> the name of the value in the usage."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line option, made from a field of a config."""

    field: str
    #: The type of a value with its bounds; for a list or a tuple, the type of an item.
    type: Any
    #: msgspec's description of `type`.
    shape: inspect.Type
    description: str
    default: Any
    is_list: bool
    is_tuple: bool = False
    #: A second option for the field; "": none.
    alias: str = ""
    #: Name of the value in the usage, as declared; "": `metavar` derives it.
    value_name: str = ""
    #: What is at the path that the text is; "": the text is no path.
    path: PathKind = ""
    #: Whether the value must not be printed.
    is_secret: bool = False

    @property
    def is_path(self) -> bool:
        return self.path != ""

    @property
    def is_switch(self) -> bool:
        return isinstance(self.shape, inspect.BoolType)

    @property
    def name(self) -> str:
        dashed = self.field.replace("_", "-")
        return f"--no-{dashed}" if self.is_switch and self.default else f"--{dashed}"

    @property
    def opposite(self) -> str:
        """The option of a switch that sets its default, against the file of --config."""
        return f"--{self.name.removeprefix('--no-')}" if self.default else f"--no-{self.name[2:]}"

    @property
    def metavar(self) -> str:
        if isinstance(self.shape, inspect.LiteralType):
            return "{" + ",".join(map(str, self.shape.values)) + "}"
        name = self.value_name or self._noun
        return f"{name},..." if self.is_tuple else name

    @property
    def takes(self) -> str:
        """The values that the option accepts, in words: "a whole number from 1 to 65535"."""
        if self.is_switch:
            return "true or false"
        if isinstance(self.shape, inspect.LiteralType):
            return "one of " + ", ".join(map(str, self.shape.values))
        range_ = _range_in_words(self.shape)
        joint = " of " if range_.startswith("at ") else " "
        return KINDS[type(self.shape)][1] + (joint + range_ if range_ else "")

    @property
    def help(self) -> str:
        if self.is_switch:
            return f"do not {self.description}" if self.default else self.description
        facts = [] if isinstance(self.shape, inspect.LiteralType) else [_range_in_words(self.shape)]
        if not self.is_list and self.default not in ("", (), NODEFAULT):
            facts.append(f"default {self._default}")
        facts = [fact for fact in facts if fact]
        return self.description + (f" ({'; '.join(facts)})" if facts else "")

    @property
    def _noun(self) -> str:
        """The name of the value, if none was declared."""
        if not isinstance(self.shape, inspect.StrType):
            return UNITS.get(self.field.rpartition("_")[2], KINDS[type(self.shape)][0])
        usual = "FILE" if self.is_path else KINDS[inspect.StrType][0]
        return NOUNS.get(self.description.partition(" ")[0], usual)

    @property
    def _default(self) -> str:
        values = self.default if self.is_tuple else [self.default]
        return ",".join(_number(v) if isinstance(v, float) else str(v) for v in values)

    def read(self, text: str) -> Any:
        """Return the value that `text` denotes. Raises ArgumentTypeError if it is not accepted."""
        try:
            if self.is_tuple:
                items = text.split(",")
                return tuple(msgspec.convert(item, self.type, strict=False) for item in items)
            return msgspec.convert(text, self.type, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"must be {self.takes}, not {text!r}") from None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help texts so that no line ends within an option name such as --kv-memory-gib.

    rare   the names of the values whose options are left out
    """

    def __init__(self, prog: str, *, rare: Collection[str] = (), **options: Any) -> None:
        super().__init__(prog, **options)
        self._rare = rare

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in self._rare:
            super().add_argument(action)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Add the usage. The options of a command that has many are one word, because the help
        lists them below."""
        actions = list(actions)
        arguments = [action for action in actions if not action.option_strings]
        if len(actions) - len(arguments) > MAX_OPTIONS_IN_USAGE:
            options = argparse.Action([], "options", metavar="[options]")
            actions, groups = [options, *arguments], []
        super().add_usage(usage, actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return the names of an option and its value once, as Python 3.13 does: -n, --lines N."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class PrintHelp(argparse.Action):
    """Prints the help of a command, and exits. With the value "all" the help has all options."""

    def __call__(
        self, parser: argparse.ArgumentParser, _options: Any, value: Any, _name: Any = None
    ) -> None:
        assert isinstance(parser, OneLineParser)
        print(parser.format_help(is_whole=value == ALL), end="")
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage, and exits with code 2. Options
    cannot be abbreviated. Otherwise a new option could change the meaning of a script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, add_help=False, formatter_class=HelpFormatter, **options
        )
        self._help = self.add_argument(
            *("-h", "--help"), action=PrintHelp, nargs=0, help="show this help message and exit"
        )
        self._rare: frozenset[str] = frozenset()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of a command. Refuse llama.cpp's -hf and its like, which argparse would
        read as -h with a value."""
        if self._subparsers is None:
            foreign = [word for word in args or () if word.startswith("-h") and word in OPTIONS]
            if foreign:
                self.refuse(foreign, OPTIONS)
        return super().parse_known_args(args, namespace)

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """The options and the arguments, with the hidden ones."""
        return self._actions

    def show_rarely(self, names: Collection[str]) -> None:
        """Leave the options of these values out of `--help`, and show them in `--help all`."""
        self._rare |= frozenset(names)
        self._help.nargs, self._help.metavar = "?", ALL
        self._help.help = f"show this help message and exit; {ALL}: with all options"

    def format_help(self, *, is_whole: bool = False) -> str:
        """Return the help, without the options of `show_rarely` unless it `is_whole`."""
        if is_whole or not self._rare:
            return super().format_help()
        self.formatter_class = partial(HelpFormatter, rare=self._rare)
        try:
            text = super().format_help()
        finally:
            self.formatter_class = HelpFormatter
        return f"{text}\nall options: {self.prog} --help {ALL}\n"

    def refuse(self, unknown: Sequence[str], others: Mapping[str, str]) -> NoReturn:
        """Exit with an error about the unknown options. The error suggests a replacement for each
        option that has one.

        unknown   the arguments that the parser did not recognise
        others    option of another server -> its replacement
        """
        options = [word for word in unknown if word.startswith("-")]
        if not options:
            self.error(f"unexpected argument {' '.join(unknown)!r}")
        known = [name for action in self._actions for name in action.option_strings]
        messages = []
        for option in options:
            hint = advice(option, known, others)
            messages.append(f"unknown option {option}" + (f": {hint}" if hint else ""))
        self.error("; ".join(messages))

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^:]+):", r"\1", message)
        for action in self._actions:
            name = action.metavar or action.dest
            if action.choices and message.endswith(f" are required: {name}"):
                message += f" ({', '.join(action.choices)})"
        print(f"{self.prog}: {message}  (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def allow_late(parser: argparse.ArgumentParser, argument: str) -> None:
    """Accept the optional last argument also after options. argparse itself looks for it only
    directly after the other arguments."""
    parser.set_defaults(late_argument=argument)


def let_stand_for(
    parser: argparse.ArgumentParser, argument: str, option: str, read: Callable[[str], Any]
) -> None:
    """Accept the optional last argument as the value of an option: `8001` for `--port 8001`. Other
    options may come before it.

    read   returns the value of the argument's text, or raises ArgumentTypeError
    """
    allow_late(parser, argument)
    parser.set_defaults(stands_for=(argument, option, read))


def settle_argument(options: argparse.Namespace) -> None:
    """Store the argument of `let_stand_for`, if the user gave it, as the value of its option. Call
    this after unknown options were refused: argparse may take the value of an unknown option for
    this argument."""
    argument, option, read = getattr(options, "stands_for", ("", "", str))
    text = getattr(options, argument, None)
    if text is None:
        return
    if getattr(options, option) is not None:
        options.parser.error(f"give the {option} once, as an argument or as --{option}")
    try:
        setattr(options, option, read(text))
    except argparse.ArgumentTypeError as error:
        options.parser.error(f"{option.upper()} {error}")


def take_late_argument(options: argparse.Namespace, unknown: Sequence[str]) -> bool:
    """Store the optional argument of `allow_late` if it came after options, where argparse does not
    recognise it. Return whether `unknown` was this argument."""
    name = getattr(options, "late_argument", "")
    is_it = len(unknown) == 1 and not unknown[0].startswith("-")
    if not (name and is_it and getattr(options, name) is None):
        return False
    setattr(options, name, unknown[0])
    return True


@cache
def flags_of(config: type[msgspec.Struct]) -> Sequence[Flag]:
    """Return the options for the fields of a config struct, in order of declaration, without
    `wiring` fields. Raises TypeError if a field was declared without `about`."""
    described = inspect.type_info(config)
    assert isinstance(described, inspect.StructType)
    shapes = {field.name: field.type for field in described.fields}
    flags = []
    for field in msgspec.structs.fields(config):
        shape = shapes[field.name]
        if not isinstance(shape, inspect.Metadata):
            raise TypeError(f"{config.__name__}.{field.name} has no description")
        if (shape.extra or {}).get("wiring"):
            continue
        is_list = isinstance(shape.type, inspect.ListType)
        is_tuple = isinstance(shape.type, inspect.VarTupleType)
        flags.append(
            Flag(
                field=field.name,
                type=_item(field.type) if is_list or is_tuple else field.type,
                shape=_one(shape.type),
                description=(shape.extra_json_schema or {})["description"],
                default=[] if is_list else field.default,
                is_list=is_list,
                is_tuple=is_tuple,
                alias=(shape.extra or {}).get("alias", ""),
                value_name=(shape.extra or {}).get("metavar", ""),
                path=(shape.extra or {}).get("path", ""),
                is_secret=(shape.extra or {}).get("secret", False),
            )
        )
    return flags


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[msgspec.Struct],
    *,
    title: str,
    without: Collection[str] = (),
) -> None:
    """Add the options of `config` to `parser`, in a group of their own. The first line of the
    config's docstring describes the group.

    title     title of the group
    without   fields that do not become options
    """
    summary = (config.__doc__ or "").partition("\n")[0]
    group = parser.add_argument_group(title, summary)
    add_to_group(group, [flag for flag in flags_of(config) if flag.field not in without])


def add_to_group(group: argparse._ArgumentGroup, flags: Iterable[Flag]) -> None:
    """Add options to a group of a parser."""
    for flag in flags:
        words = flag.help.replace("%", "%%")
        if flag.is_switch:
            for name, value, shown in (
                (flag.name, not flag.default, words),
                (flag.opposite, flag.default, argparse.SUPPRESS),
            ):
                group.add_argument(
                    name, dest=flag.field, action="store_const", const=value, help=shown
                )
            continue
        group.add_argument(
            *filter(None, (flag.name, flag.alias)),
            dest=flag.field,
            action="append" if flag.is_list else "store",
            metavar=flag.metavar,
            type=flag.read,
            help=words,
        )


def build(config: type[C], options: Mapping[str, Any], **wiring: Any) -> C:
    """Return a config with the values in `options` and `wiring`. Other fields have their defaults.

    options   field -> value, None if the user did not give the option
    wiring    values of `wiring` fields

    Raises ValueError if the config rejects the combination. The message names options, not fields.
    """
    fields = [flag.field for flag in flags_of(config)]
    given = {field: options[field] for field in fields if options.get(field) is not None}
    try:
        return config(**given, **wiring)
    except ValueError as error:
        raise ValueError(_as_options(str(error), fields)) from None


def to_arguments(config: msgspec.Struct, *, without: Collection[str] = ()) -> list[str]:
    """Return the command-line options from which `build` makes an equal config. Options with their
    default value are left out.

    without   fields that do not become options
    """
    arguments = []
    for flag in flags_of(type(config)):
        value = getattr(config, flag.field)
        if flag.field in without or value == flag.default:
            continue
        if flag.is_switch:
            arguments.append(flag.name)
            continue
        values = value if flag.is_list else [value]
        texts = [",".join(map(str, each)) if flag.is_tuple else str(each) for each in values]
        arguments += [f"{flag.name}={text}" for text in texts]  # a value may start with "-"
    return arguments


def _item(annotated: Any) -> Any:
    """Return the X of Annotated[list[X], ...] or Annotated[tuple[X, ...], ...]."""
    return get_args(get_args(annotated)[0])[0]


def _one(shape: inspect.Type) -> inspect.Type:
    """Return the type of an item of a list or a tuple; other types unchanged."""
    if isinstance(shape, inspect.ListType | inspect.VarTupleType):
        shape = shape.item_type
    return shape.type if isinstance(shape, inspect.Metadata) else shape


def _range_in_words(shape: inspect.Type) -> str:
    low, high = getattr(shape, "ge", None), getattr(shape, "le", None)
    above = getattr(shape, "gt", None)
    if above is not None:
        return f"above {above:g}" + (f", at most {_number(high)}" if high is not None else "")
    if low is not None and high is not None:
        return f"from {low:g} to {_number(high)}"
    if low is not None:
        return f"at least {low:g}"
    return f"at most {_number(high)}" if high is not None else ""


def _number(value: float) -> str:
    """Format a number without an exponent: 65535, not 6.5535e+04."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _as_options(message: str, fields: Iterable[str]) -> str:
    """Return `message` with the names of fields spelt as options: --max-len for max_len."""
    names = "|".join(map(re.escape, fields))
    return re.sub(rf"\b({names})\b", lambda found: "--" + found[0].replace("_", "-"), message)
