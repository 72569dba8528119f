"""Checks that `tidegate serve` runs in a process before it starts a gateway.

    python -P -m gateway.startup_checks          Is every option valid?
    python -P -m gateway.startup_checks --model  Can the model be served? Stdin has its card.

The config is JSON in the environment variable TIDEGATE_GATEWAY. The exit code is one of ExitCode.
If it is not 0, one line has the reason: on stderr for the options, on stdout for the model. No port
is opened, and no engine is contacted.

The check of a model may be started before the card exists, so that the start of its process
overlaps with reading the model's files. For the same reason each check imports only the modules
that it needs.
"""

from __future__ import annotations

import sys

import msgspec

from gateway.sandbox.clients import TemplateProcesses, trial_process, try_tokenizer
from protocol.config.gateway import GatewayConfig
from protocol.engine.model_card import ModelCard
from protocol.process.exit_codes import ExitCode


def main() -> int:
    return check_model() if "--model" in sys.argv[1:] else check_options()


def check_options() -> int:
    """Create the application, as a gateway process does, and return the exit code."""
    from gunicorn.errors import AppImportError

    from gateway.app import CANNOT_START, EXTENSION, create_app

    try:
        app = create_app()
    except AppImportError as error:
        print(str(error).removeprefix(CANNOT_START), file=sys.stderr)
        return ExitCode.USAGE
    app.extensions[EXTENSION].templates.close()
    return ExitCode.OK


def check_model() -> int:
    """Try the model's tokenizer and the configured formats, and return the exit code."""
    trial = trial_process()
    trial.start()
    config = GatewayConfig.from_environment()
    card = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelCard)
    try:
        try_tokenizer(card.tokenizer, trial)
    except ValueError as error:
        return _refused(error, ExitCode.BAD_MODEL)
    return _check_formats(card, config) if config.hosted[0].names_formats else ExitCode.OK


def _check_formats(card: ModelCard, config: GatewayConfig) -> int:
    """Check the named formats by preparing the model, as a gateway process does."""
    from gateway.engine.base import limits_without_engine  # most checks do not need these modules
    from gateway.formats.model_format import WrongOption
    from gateway.served_model import ModelOptions, ServedModel

    templates = TemplateProcesses()
    limits = limits_without_engine(card.context_tokens)
    code = ExitCode.USAGE
    try:
        options = ModelOptions.from_config(config.hosted[0], templates)
        code = ExitCode.BAD_MODEL
        ServedModel.from_card(card, limits, options, templates)
    except ValueError as error:
        return _refused(error, ExitCode.USAGE if isinstance(error, WrongOption) else code)
    finally:
        templates.close()
    return ExitCode.OK


def _refused(error: ValueError, code: ExitCode) -> int:
    """Print the reason in one line, and return the exit code."""
    line = " ".join(str(error).split())
    sys.stdout.buffer.write(line.encode("utf-8", "replace") + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
