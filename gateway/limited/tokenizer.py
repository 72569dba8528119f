"""A trial of a model's tokenizer before it is used, in a process with limits.

A tokenizer that is damaged, slow, or needs much memory ends the start, instead of requests later.
"""

from __future__ import annotations

from gateway.limited.calls import CallFailed, TryTokenizer
from gateway.limited.process import LimitedProcess, LimitExceeded

CPU_S = 60.0
"""A vocabulary of 256,000 tokens is read in a second."""
MEMORY_BYTES = 4 << 30
REMEDY = "fetch the model's files again, or use another model"


def trial_process() -> LimitedProcess:
    """Return a process for one trial. It may be started before there is anything to try."""
    return LimitedProcess(cpu_s=CPU_S, memory_bytes=MEMORY_BYTES, wall_s=4 * CPU_S)


def try_tokenizer(tokenizer: bytes, process: LimitedProcess) -> None:
    """Try the bytes of a tokenizer.json, then close the process. Raises ValueError, with a remedy,
    if the tokenizer cannot be used."""
    try:
        reply = process.call(TryTokenizer(tokenizer.decode()))
    except (UnicodeDecodeError, LimitExceeded) as error:
        raise ValueError(_unusable(str(error))) from None
    finally:
        process.close()
    if isinstance(reply, CallFailed):
        raise ValueError(_unusable(reply.message))


def _unusable(why: str) -> str:
    return f"the model's tokenizer cannot be used: {why}; {REMEDY}"
