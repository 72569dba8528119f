"""`python -P -m worker.startup.check_config FILE`: check whether a model can be served.

FILE is a config.json or the start of a GGUF file. This needs no weights, so a model that is not
supported is found before they are downloaded. If the model is not supported, the exit code is that
of ExitCode.BAD_MODEL, and stderr has the reason and the remedy in one line. torch is not imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import has_magic
from worker.checkpoint.gguf_families import gguf_family
from worker.checkpoint.gguf_file import architecture_at_start
from worker.encoders.families.registry import find_encoder
from worker.encoders.gguf import ENCODERS
from worker.errors import UnusableModel
from worker.spec.architectures import fallback
from worker.spec.families.registry import find_family
from worker.spec.fields import read_json
from worker.spec.wrappers import text_part

REMEDY = "use another model"


def check_config(file: Path) -> None:
    """Raise UnusableModel if `file` describes a model that is not supported.

    file   a GGUF file named *.gguf, or at least its first bytes; a file with any other name is read
           as a config.json
    """
    if file.suffix == ".gguf":
        if not has_magic(file):
            raise UnusableModel("the file that the server sends is not a GGUF file")
        architecture = architecture_at_start(file)
        if architecture and architecture not in ENCODERS:
            gguf_family(architecture)
        return
    config = read_json(file)
    if (encoder := find_encoder(config)) is not None:
        encoder.spec(config)
        return
    config = text_part(config) or config
    if fallback(config) is None:
        find_family(config).spec(config)


def main() -> int:
    try:
        check_config(Path(sys.argv[1]))
    except UnusableModel as error:
        print(f"{error.message}; {error.remedy or REMEDY}", file=sys.stderr)
        return ExitCode.BAD_MODEL
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
