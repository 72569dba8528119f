"""The sampling parameters of `tidegate chat` and `tidegate run`: options, and names of `/set`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from protocol.engine.sampling import (
    AdditivePenalty,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from protocol.wire.field_words import allowed_words

DEFAULT = "default"
"""The value of `/set` that stands for the model's own."""


class SamplingOption(NamedTuple):
    """An option, and the field of requests that it sets."""

    field: str
    type: Any
    metavar: str
    help: str

    @property
    def name(self) -> str:
        return f"--{self.field.replace('_', '-')}"

    def read(self, text: str) -> Any:
        """Return the value that `text` denotes. Raises ValueError if it is not accepted."""
        try:
            return msgspec.convert(text, self.type, strict=False)
        except msgspec.ValidationError:
            raise ValueError(f"must be {allowed_words(self.type)}; got {text!r}") from None


SAMPLING = (
    SamplingOption(
        "temperature", Temperature, "X", "sampling temperature (default: the model's own)"
    ),
    SamplingOption("top_p", TopP, "X", "probability mass to sample from (default: the model's)"),
    SamplingOption("top_k", TopK, "N", "most tokens to sample from; 0: all (default: the model's)"),
    SamplingOption(
        "min_p", MinP, "X", "least probability, as a fraction of the largest (default: the model's)"
    ),
    SamplingOption(
        "repetition_penalty",
        RepetitionPenalty,
        "X",
        "above 1: repeat less, below 1: more (default: the model's)",
    ),
    SamplingOption(
        "frequency_penalty",
        AdditivePenalty,
        "X",
        "lower what was used often (default: the model's)",
    ),
    SamplingOption(
        "presence_penalty", AdditivePenalty, "X", "lower what was used (default: the model's)"
    ),
    SamplingOption("max_tokens", MaxTokens, "N", "maximum length of an answer (default: no limit)"),
    SamplingOption("seed", Seed, "N", "seed for reproducible answers"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    for option in SAMPLING:
        parser.add_argument(
            option.name,
            dest=option.field,
            type=_reader(option),
            metavar=option.metavar,
            help=option.help,
        )


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the user has given, as fields of a request."""
    given = {option.field: getattr(options, option.field) for option in SAMPLING}
    return {field: value for field, value in given.items() if value is not None}


def _reader(option: SamplingOption) -> Callable[[str], Any]:
    """Return a function that converts the text of an option to its value."""

    def read(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def change(options: Mapping[str, Any], argument: str) -> dict[str, Any]:
    """Return the sampling parameters after `/set NAME VALUE`. Raises ValueError, naming the
    parameter, if there is no such parameter or if the value is not accepted."""
    name, _, text = argument.partition(" ")
    field, text = name.replace("-", "_"), text.strip()
    option = next((each for each in SAMPLING if each.field == field), None)
    if option is None:
        names = ", ".join(each.field for each in SAMPLING)
        raise ValueError(f"no parameter {name!r}; there are {names}")
    if not text:
        raise ValueError(f"{field} needs a value, or {DEFAULT} for the model's own")
    changed = {key: value for key, value in options.items() if key != field}
    if text == DEFAULT:
        return changed
    try:
        return {**changed, field: option.read(text)}
    except ValueError as error:
        raise ValueError(f"{field} {error}") from None


def listed(options: Mapping[str, Any]) -> str:
    """Return a line for each sampling parameter: its name, its value, and the values it accepts."""
    width = max(len(option.field) for option in SAMPLING)
    values = {option.field: options.get(option.field, DEFAULT) for option in SAMPLING}
    return "\n".join(
        f"{option.field:<{width}}  {values[option.field]:<10}  {allowed_words(option.type)}"
        for option in SAMPLING
    )
