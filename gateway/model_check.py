"""Checks whether a gateway could serve a model: `python -P -m gateway.model_check`.

The config comes as JSON in TIDEGATE_GATEWAY, the model's card as JSON on stdin. The process may be
started before the card exists, so that its start overlaps with reading the model's files. If the
model cannot be served, stdout has one line with the reason and a remedy, and the exit code is one
of ExitCode. No port is opened, and no engine is contacted.
"""

from __future__ import annotations

import sys

import msgspec

from gateway.config import config_from_environment
from gateway.sandbox.clients import TemplateProcesses, trial_process, try_tokenizer
from protocol.config.gateway import GatewayConfig
from protocol.exit_codes import ExitCode
from protocol.model_card import ModelCard


def main() -> int:
    trial = trial_process()
    trial.start()
    config = config_from_environment()
    card = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelCard)
    try:
        try_tokenizer(card.tokenizer, trial)
    except ValueError as error:
        return _refused(error, ExitCode.BAD_MODEL)
    if (config.tool_format, config.reasoning_format) == ("auto", "auto"):
        return ExitCode.OK
    return _check_formats(card, config)


def _check_formats(card: ModelCard, config: GatewayConfig) -> int:
    """Check the named formats by making the model usable, as a gateway does."""
    from gateway.engine.null import limits_without_engine  # most starts do not need these modules
    from gateway.formats.model_format import WrongOption
    from gateway.served_model import ModelOptions, ServedModel

    templates = TemplateProcesses()
    limits = limits_without_engine(card.context_tokens)
    code = ExitCode.USAGE
    try:
        options = ModelOptions.of(config, templates)
        code = ExitCode.BAD_MODEL
        ServedModel.of(card, limits, options, templates)
    except ValueError as error:
        return _refused(error, ExitCode.USAGE if isinstance(error, WrongOption) else code)
    finally:
        templates.close()
    return ExitCode.OK


def _refused(error: ValueError, code: ExitCode) -> int:
    line = " ".join(str(error).split())
    sys.stdout.buffer.write(line.encode("utf-8", "replace") + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
