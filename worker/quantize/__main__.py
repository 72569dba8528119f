"""`python -P -m worker.quantize JOB`: write a quantised GGUF file.

JOB is a `QuantizeJob` as JSON. Each line of stdout is a `QuantizeProgress` as JSON. If the model
cannot be read, or cannot be stored, the exit code is that of ExitCode.BAD_MODEL, and the last line
of stderr has the reason and the remedy.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.tools.quantize import QuantizeJob, QuantizeProgress
from worker.errors import UnusableModel
from worker.quantize.writing import quantize_model

REMEDY = "serve the safetensors as they are, or choose another model"


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.FAILED))  # removes the file
    job = msgspec.json.decode(sys.argv[1], type=QuantizeJob)
    try:
        quantize_model(Path(job.model), Path(job.output), job.type, _print)
    except UnusableModel as error:
        print(f"{error.message}; {error.remedy or REMEDY}", file=sys.stderr)
        return ExitCode.BAD_MODEL
    except OSError as error:
        print(f"cannot write {job.output}: {error.strerror or error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


def _print(tensor: str, written_bytes: int, total_bytes: int) -> None:
    progress = QuantizeProgress(tensor=tensor, written_bytes=written_bytes, total_bytes=total_bytes)
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
