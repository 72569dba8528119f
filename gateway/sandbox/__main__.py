"""`python -P -m gateway.sandbox`: runs templates, tokenizers and image processors for the gateway
that started it.

The stdin of this process is a socket to the gateway, from which it reads calls and to which it
writes replies. It uses no other socket. It opens files only to read them: its own modules and, on
Linux, /proc/self/statm.

The kernel enforces these limits, so no template has to be inspected:

    memory    On Linux, RLIMIT_AS limits the address space to its size at the start plus
              --memory-bytes. Beyond that Python raises MemoryError, which is reported. The process
              then ends, so that the next call gets a process with a clean heap. It also ends after
              a call if it has grown by --retire-bytes.
    CPU time  Each call has a timer, whose signal ends the process.
    files     No file can be written, and no core is dumped.
    lifetime  When the gateway ends, Linux sends SIGKILL to this process. The process also ends when
              its socket is closed. Signals for a whole process group (Ctrl-C) are blocked from the
              start.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

from gateway.prompt.probe import RAISED_BY_TEMPLATES
from gateway.prompt.template import ChatTemplate
from gateway.sandbox.messages import (
    HEAD_BYTES,
    Buffer,
    Call,
    CallFailed,
    ImageProcessed,
    LoadProcessor,
    LoadTemplate,
    OutOfMemory,
    ProbeTemplate,
    ProcessImage,
    ProcessorLoaded,
    RenderTemplate,
    Reply,
    TemplateLoaded,
    TemplateProbed,
    TemplateRendered,
    TensorHead,
    TokenizerWorks,
    TryTokenizer,
    decode_call,
    encode,
    marked_last,
    sizes_of,
    to_frame,
)
from protocol.engine.attachments import attachment_digest
from protocol.process.lifeline import die_with_parent
from protocol.process.process_title import set_title

MAX_OUTPUT_CHARS = 16_000_000
MAX_MESSAGE_CHARS = 1_000
MAX_TEMPLATES = 16
"""Maximum number of compiled templates that are kept."""


class Footprint:
    """Reads how much memory this process uses. The values are 0 on systems other than Linux."""

    def __init__(self) -> None:
        self._file = open("/proc/self/statm", "rb") if sys.platform == "linux" else None  # noqa: SIM115

    def address_space(self) -> int:
        return self._pages()[0] * resource.getpagesize()

    def resident(self) -> int:
        return self._pages()[1] * resource.getpagesize()

    def _pages(self) -> tuple[int, int]:
        """Return the numbers of pages in the address space and in resident memory."""
        if self._file is None:
            return 0, 0
        total, resident, *_ = os.pread(self._file.fileno(), 256, 0).split()
        return int(total), int(resident)


def set_limits(footprint: Footprint, memory_bytes: int) -> None:
    """Forbid writing files. Limit the growth of the address space to `memory_bytes`."""
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if sys.platform == "linux":
        most = footprint.address_space() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(connection: socket.socket, footprint: Footprint, cpu_s: float, retire_bytes: int) -> None:
    """Answer calls until the gateway closes the connection. Once the process has run out of memory
    or has grown by `retire_bytes`, mark the current reply as the last one, send it and return."""
    most = footprint.resident() + retire_bytes
    is_last = False
    while not is_last and (received := _receive_frame(connection)):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply, raw = _try_call(*received)
        data = to_frame(reply, raw)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = isinstance(reply, OutOfMemory)
        del received, reply, raw
        is_last = is_last or footprint.resident() > most + len(data)
        connection.sendall(marked_last(data) if is_last else data)
        del data


def _receive_frame(connection: socket.socket) -> tuple[bytearray, bytearray] | None:
    """Return the JSON and the raw bytes of the next call; None if the gateway has closed the
    connection."""
    if (head := _read_exactly(connection, HEAD_BYTES)) is None:
        return None
    size, raw_size, _ = sizes_of(head)
    frame, raw = _read_exactly(connection, size), _read_exactly(connection, raw_size)
    return None if frame is None or raw is None else (frame, raw)


def _read_exactly(connection: socket.socket, size: int) -> bytearray | None:
    """Return the next `size` bytes; None if the connection is closed before they have arrived."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            return None
        rest = rest[received:]
    return data


def _try_call(frame: bytearray, raw: bytearray) -> tuple[Reply, Sequence[Buffer]]:
    """Run a call and return its reply, with the raw bytes of the reply's frame. If it raises an
    exception, the reply reports that."""
    try:
        call = decode_call(frame)
        if isinstance(call, ProcessImage):
            return _process_image(call, bytes(raw))
        return _run_call(call), ()
    except MemoryError:
        return OutOfMemory(), ()
    except RAISED_BY_TEMPLATES as error:
        return CallFailed(_shortened(str(error))), ()
    except Exception as error:  # foreign code may raise anything
        return CallFailed(_shortened(f"{type(error).__name__}: {error}")), ()


def _shortened(text: str) -> str:
    """Return an error message, truncated, with "?" for each half of a surrogate pair."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def _run_call(call: Call) -> Reply:
    """Run a call and return its reply. Raises what the template or tokenizer raises."""
    match call:
        case LoadTemplate():
            template = _template(call.source, tuple(call.special_tokens.items()))
            return TemplateLoaded(template.traits, template.profile)
        case ProbeTemplate():
            template = _template(call.source, tuple(call.special_tokens.items()))
            reply = TemplateProbed(template.written)
            encode(reply)  # raises UnicodeEncodeError for half of a surrogate pair
            return reply
        case RenderTemplate():
            template = _template(call.source, tuple(call.special_tokens.items()))
            text = template.render_variables(call.variables)
            if len(text) > MAX_OUTPUT_CHARS:
                return CallFailed(f"it writes more than {MAX_OUTPUT_CHARS:,} characters")
            text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
            return TemplateRendered(text)
        case TryTokenizer():
            from gateway.text.trial import run_trial  # imported here: templates do not need it

            run_trial(call.tokenizer)
            return TokenizerWorks()
        case LoadProcessor():
            _image_processing().load(call.settings)
            return ProcessorLoaded()
    raise AssertionError(call)


def _image_processing() -> ModuleType:
    """Import the module that needs Pillow, numpy and transformers, without torch. Raises
    ImportError if they are not installed."""
    from gateway.images import processor

    return processor


def _process_image(call: ProcessImage, data: bytes) -> tuple[Reply, Sequence[Buffer]]:
    """Decode and preprocess an image. Returns the reply and the data of its tensors."""
    found = _image_processing().preprocessed(data, call.settings)
    heads = [TensorHead(each.name, each.dtype, each.shape) for each in found.tensors]
    reply = ImageProcessed(
        heads,
        attachment_digest(found.tensors),
        found.numbers,
        found.shapes,
        found.decode_s,
        found.preprocess_s,
    )
    return reply, [each.data.data for each in found.tensors]


@lru_cache(maxsize=MAX_TEMPLATES)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(prog="gateway.sandbox")
    parser.add_argument("--cpu-s", type=float, required=True, help="CPU time of one call")
    parser.add_argument(
        "--memory-bytes", type=int, required=True, help="memory in addition to that at the start"
    )
    parser.add_argument(
        "--retire-bytes", type=int, required=True, help="growth after which the process ends"
    )
    parser.add_argument("--nice", type=int, default=0, help="added to the niceness")
    options = parser.parse_args()
    os.closerange(3, 1 << 20)  # close sockets that the gateway's parent lets children inherit
    set_title("templates")
    die_with_parent(signal.SIGKILL)
    os.nice(options.nice)
    footprint = Footprint()
    set_limits(footprint, options.memory_bytes)
    with socket.socket(fileno=0) as connection:
        serve(connection, footprint, options.cpu_s, options.retire_bytes)


if __name__ == "__main__":
    main()
