"""The options with sampling parameters, which `tidegate chat` and `tidegate run` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from protocol.engine.sampling import MaxTokens, Seed, Temperature, TopP
from protocol.wire.field_words import allowed_words


class SamplingOption(NamedTuple):
    """An option, and the field of requests that it sets."""

    field: str
    type: Any
    metavar: str
    help: str

    @property
    def name(self) -> str:
        return f"--{self.field.replace('_', '-')}"


SAMPLING = (
    SamplingOption(
        "temperature", Temperature, "X", "sampling temperature (default: the model's own)"
    ),
    SamplingOption("top_p", TopP, "X", "probability mass to sample from (default: the model's)"),
    SamplingOption("max_tokens", MaxTokens, "N", "maximum length of an answer (default: no limit)"),
    SamplingOption("seed", Seed, "N", "seed for reproducible answers"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    for option in SAMPLING:
        parser.add_argument(
            option.name,
            dest=option.field,
            type=_reader(option.type),
            metavar=option.metavar,
            help=option.help,
        )


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the user has given, as fields of a request."""
    given = {option.field: getattr(options, option.field) for option in SAMPLING}
    return {field: value for field, value in given.items() if value is not None}


def _reader(type_: Any) -> Callable[[str], Any]:
    """Return a function that converts the text of an option to a value of `type_`."""

    def read(text: str) -> Any:
        try:
            return msgspec.convert(text, type_, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(
                f"must be {allowed_words(type_)}; got {text!r}"
            ) from None

    return read
