"""A fake engine for tests of the gateway: a real ROUTER socket and protocol, scripted tokens.

It runs in a thread of the test. The test reads the requests (`generates`, `aborts`) and sets the
replies.

    with ScriptedEngine(address) as engine:
        engine.script = lambda generate: text_reply("Hello", size=2)

A request with `kv_readers` is answered with a handle, unless `computes` replies otherwise. The
prompt of a request with a handle is reported as fetched. A request that encodes gets the results of
`scripted_vector`, if the card says that the model encodes.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Self

import msgspec
import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers

from protocol.engine.adapters import AdapterInfo
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Accepted,
    AdapterChanged,
    Adapters,
    AttachData,
    Drain,
    Encode,
    EngineStatus,
    Generate,
    GetStatus,
    GetTimeline,
    Goodbye,
    Hello,
    KeepKV,
    Limits,
    LoadAdapter,
    Loading,
    Output,
    Outputs,
    Ping,
    Pong,
    Refused,
    ReleaseKV,
    RequestTimelines,
    ResourcesFreed,
    Times,
    ToEngine,
    UnloadAdapter,
    Usage,
    Welcome,
)
from protocol.engine.model_card import ModelCard, SamplingDefaults
from protocol.engine.stats import EngineLoad, EngineStats
from protocol.engine.timeline import AbortReason, EngineTimeline
from protocol.engine.usage import RequestStatus
from protocol.wire import codec, sockets
from protocol.wire.arrays import Float32
from protocol.wire.errors import (
    AttachmentMissing,
    ErrorInfo,
    InvalidRequest,
    ServingError,
    StaleAdapter,
    UnknownModel,
)
from tests.support.waiting import HANG_S, eventually

BOS, EOS, END = 256, 257, 258
BLOCK_TOKENS = 16
POLL_S = 0.001
IDLE_S = 0.02
"""How long an engine that makes no steps waits for a message. A test may let it make steps again at
any time, without a message."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


MARKERS = {"<think>": 259, "</think>": 260, "<tool_call>": 261, "</tool_call>": 262}
"""Markers of a model that thinks and calls tools. As usual, they are not special tokens."""
THINKING_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<tool>{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}{% if enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)
"""Turns thinking on or off by `enable_thinking`; without this variable, the model decides."""


def byte_tokenizer(markers: Iterable[str] = ()) -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per byte, three special tokens and `markers`. The id of a
    byte's token is the byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = _letters_by_byte(letters)
    vocab = {letter: byte for byte, letter in by_byte.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>", "<end>"])
    inner.add_tokens([tokenizers.AddedToken(m, special=False, normalized=False) for m in markers])
    return inner


def _letters_by_byte(letters: Iterable[str]) -> dict[int, str]:
    """Return GPT-2's letter of each byte: printable bytes as they are, others from U+0100 on."""
    own = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in own)
    return own | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def scripted_card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": "scripted",
        "architecture": "Scripted",
        "digest": "0123456789abcdef",
        "vocab_size": 259,
        "context_tokens": 4096,
        "tokenizer": byte_tokenizer().to_str().encode(),
        "eos_token_ids": [EOS],
        "bos_token_id": BOS,
        "special_tokens": {"bos_token": "<bos>", "eos_token": "<eos>"},
        "chat_template": TEMPLATE,
        "defaults": SamplingDefaults(temperature=0.7, top_k=40),
    }
    return ModelCard(**(fields | changes))


def thinking_card(**changes: Any) -> ModelCard:
    """Return the card of a model that thinks and calls tools, with `MARKERS` as tokens."""
    fields = {
        "vocab_size": 259 + len(MARKERS),
        "tokenizer": byte_tokenizer(MARKERS).to_str().encode(),
        "chat_template": THINKING_TEMPLATE,
    }
    return scripted_card(**(fields | changes))


INFILL_MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""The markers of a model that fills in the middle. Their ids follow those of `MARKERS`."""


def infill_card(**changes: Any) -> ModelCard:
    """Return the card of a model that also fills in the middle, with `INFILL_MARKERS` as tokens."""
    fields = {
        "vocab_size": 259 + len(MARKERS) + len(INFILL_MARKERS),
        "tokenizer": byte_tokenizer((*MARKERS, *INFILL_MARKERS)).to_str().encode(),
    }
    return thinking_card(**(fields | changes))


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def marked_ids(text: str) -> list[int]:
    """Return the ids of a text, with `MARKERS` as tokens."""
    parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    return [i for part in parts for i in ([MARKERS[part]] if part in MARKERS else part.encode())]


def text_of(ids: Iterable[int]) -> str:
    """Return the text of token ids, without special tokens."""
    spelt = {token_id: marker.encode() for marker, token_id in MARKERS.items()}
    data = b"".join(bytes([i]) if i < 256 else spelt.get(i, b"") for i in ids)
    return data.decode("utf-8", "replace")


def prompt_of(engine: ScriptedEngine) -> str:
    """Return the prompt of the last request that the engine has received, as text."""
    return text_of(engine.generates[-1].prompt.tolist())


@dataclass
class TokenReply:
    """A scripted answer: the token ids of each step, and its end. A step may be empty."""

    steps: list[list[int]]
    finish: str = "stop"
    stop_token: int | None = EOS
    error: ErrorInfo | None = None


Reply = TokenReply | ErrorInfo
Script = Callable[[Generate], Reply]


def prefill_reply(after_steps: int = 1) -> TokenReply:
    """Return the reply to a request that only computes its prompt, in `after_steps` steps."""
    return TokenReply([[]] * after_steps, "length", None)


def text_reply(
    text: str,
    *,
    size: int = 1,
    finish: str = "stop",
    error: ErrorInfo | None = None,
    marked: bool = False,
) -> TokenReply:
    """Return a reply of `text`, `size` tokens a step.

    marked   whether `MARKERS` are tokens
    """
    ids = marked_ids(text) if marked else ids_of(text)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    return TokenReply(steps, finish, EOS if finish == "stop" else None, error)


def scripted_vector(tokens: Sequence[int], size: int) -> list[float]:
    """Return the scripted result of one input, which has length 1 and depends on all its tokens."""
    raw = [1.0 + sum(token % (place + 3) for token in tokens) for place in range(size)]
    length = math.hypot(*raw)
    return [number / length for number in raw]


@dataclass
class _Talk:
    client: bytes
    message: Generate | Encode
    steps: deque[list[int]]
    reply: TokenReply
    num_generated: int = 0
    has_output: bool = False


BEHAVIOUR = (
    "script",
    "computes",
    "refuses",
    "step_s",
    "is_paused",
    "ignores_aborts",
    "is_silent",
    "welcomes",
    "max_clients",
)


@dataclass
class ScriptedEngine:
    """An engine whose replies a test sets.

    script           returns the reply to a Generate
    computes         returns the reply to a Generate with `kv_readers`
    step_s           time between two steps
    is_paused        whether the engine makes no steps, but answers messages
    ignores_aborts   whether it ignores aborts, as if each arrived just after the end
    is_silent        whether it answers nothing, as if the process hung
    max_clients      most clients that it welcomes; the next ones get Loading
    welcomes         whether it answers Hello with Welcome; else with Loading, which reports
                     `loading_s`
    refuses          returns the refusal of an Encode; None: it is accepted
    generates        all requests received
    encodes          the same for those that encode
    aborts           number of each aborted request -> time of its Abort
    abort_reasons    number of each aborted request -> the reason in its Abort
    num_steps        steps made
    num_early        requests that gateways refused from their cache, as their pings report
    goodbyes         number of Goodbyes received
    ignored          types of the messages received while the engine was silent
    adapters         the LoRA adapters; a load succeeds unless the name is taken
    replaces_adapters  replaces each adapter after a request was refused for its adapter
    kept, released   handles of all KeepKV and ReleaseKV messages
    attached         digests of all AttachData messages
    loses_images     refuses the next request that names images, and forgets them
    timelines        name of a request -> its timeline
    rows             open requests in a status
    num_polls        number of GetStatus messages received; num_pings: of Ping messages
    num_read         number of Pongs that the client has read, according to its last Ping
    """

    address: str
    script: Script = lambda generate: text_reply("Hello, world!")
    computes: Script = lambda generate: prefill_reply()
    refuses: Callable[[Encode], ErrorInfo | None] = lambda encode: None
    card: ModelCard = field(default_factory=scripted_card)
    step_s: float = 0.0005
    max_len: int = 512
    is_paused: bool = False
    ignores_aborts: bool = False
    is_silent: bool = False
    welcomes: bool = True
    max_clients: float = math.inf
    loading_s: float = 3.0
    generates: list[Generate] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    aborts: dict[int, float] = field(default_factory=dict)
    abort_reasons: dict[int, AbortReason] = field(default_factory=dict)
    num_steps: int = 0
    num_early: int = 0
    goodbyes: int = 0
    ignored: list[type] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    loses_images: bool = False
    kv_lease_s: float = 3.0
    state_bytes: int = 0
    adapters: list[AdapterInfo] = field(default_factory=list)
    replaces_adapters: bool = False
    timelines: dict[str, EngineTimeline] = field(default_factory=dict)
    timelines_error: ErrorInfo | None = None
    rows: list[RequestStatus] = field(default_factory=list)
    num_polls: int = 0
    num_pings: int = 0
    num_read: int = 0

    def __post_init__(self) -> None:
        self.epoch = f"epoch-{time.monotonic_ns()}"
        self.stats = EngineStats(running=1, free_blocks=7, num_finished={"stop": 3})
        self._first = {name: getattr(self, name) for name in BEHAVIOUR}
        self._talks: dict[tuple[bytes, int], _Talk] = {}
        self._clients: set[bytes] = set()  # those that were welcomed
        self._stopping = False
        self._next_step = 0.0
        self._failure: BaseException | None = None
        self._decoder: codec.Decoder[ToEngine] = codec.Decoder(ToEngine)

    def reset(self) -> None:
        """Restore the engine's initial behaviour, and empty what it has recorded. Open requests
        remain."""
        for name, value in self._first.items():
            setattr(self, name, value)
        for recorded in (
            self.generates,
            self.encodes,
            self.aborts,
            self.abort_reasons,
            self.ignored,
            self.kept,
            self.released,
            self.attached,
        ):
            recorded.clear()
        self.timelines.clear()
        self.rows = []
        self.goodbyes = 0

    def __enter__(self) -> Self:
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.bind_router(self._context, self.address)
        self._thread = threading.Thread(target=self._run, name="scripted-engine")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Stop without a Goodbye. Raises the exception of the engine's thread, if it failed."""
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)
        if self._failure is not None:
            raise self._failure

    def await_idle(self, timeout_s: float = HANG_S) -> None:
        """Wait until no request is open."""
        is_idle = eventually(lambda: not self._talks, within_s=timeout_s, every_s=POLL_S)
        assert is_idle, f"still open: {[n for _, n in self._talks]}"

    @property
    def num_open(self) -> int:
        """Number of requests that are open."""
        return len(self._talks)

    def resume(self) -> None:
        """Make steps again, after `is_paused`."""
        self.is_paused = False

    def lose_clients(self) -> None:
        """Drop all open requests, as a real engine does when a client's lease ends."""
        self._talks.clear()

    def await_abort(self, number: int, timeout_s: float = HANG_S) -> float:
        """Wait for the Abort of request `number`. Return its time on time.monotonic's clock."""
        came = eventually(lambda: number in self.aborts, within_s=timeout_s, every_s=POLL_S)
        assert came, f"request {number} was not aborted"
        return self.aborts[number]

    def await_generates(self, count: int, timeout_s: float = HANG_S) -> None:
        came = eventually(lambda: len(self.generates) >= count, within_s=timeout_s, every_s=POLL_S)
        assert came, f"{len(self.generates)} of {count} requests came"

    def await_read(self) -> None:
        """Wait until the only client has read all messages sent to it so far."""
        next_pong = self.num_pings + 1
        assert eventually(lambda: self.num_read >= next_pong, every_s=POLL_S), "it reads nothing"

    def await_steps(self, count: int, timeout_s: float = HANG_S) -> None:
        """Wait for `count` more steps of any requests."""
        before = self.num_steps
        came = eventually(
            lambda: self.num_steps >= before + count, within_s=timeout_s, every_s=POLL_S
        )
        assert came, f"{self.num_steps - before} of {count} steps"

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except BaseException as error:
            self._failure = error

    def _round(self) -> None:
        """Read all messages, and make a step if one is due. The first step is due `step_s` after
        the first request, so that requests sent together are answered together."""
        wait_s = self._next_step - time.monotonic() if self._talks else IDLE_S
        if self.is_paused or self.is_silent:
            wait_s = max(wait_s, IDLE_S)
        was_idle = not self._talks
        timeout_ms = max(0, int(wait_s * 1000 + 0.5))
        while self._socket.poll(timeout_ms):
            self._receive()
            timeout_ms = 0
        now = time.monotonic()
        if was_idle:
            self._next_step = now + self.step_s
        elif now >= self._next_step and not self.is_paused and not self.is_silent:
            self._step()
            self._next_step = max(self._next_step + self.step_s, now)

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart()
        message = self._decoder.decode(frames)
        if self.is_silent:
            self.ignored.append(type(message))
            return
        match message:
            case Hello():
                is_welcome = client in self._clients or len(self._clients) < self.max_clients
                if self.welcomes and is_welcome:
                    self._clients.add(client)
                    self._send(client, self._welcome())
                else:
                    self._send(client, Loading(elapsed_s=self.loading_s))
            case Ping(num_early=num_early, read_bytes=num_read):
                self.num_pings += 1
                self.num_early += num_early
                self.num_read = num_read  # clients return what Pongs have as `sent_bytes`
                pong = Pong(epoch=self.epoch, stats=self.stats, sent_bytes=self.num_pings)
                self._send(client, pong)
            case AttachData(digest=digest):
                self.attached.append(digest)
            case Generate() if message.attachments and self.loses_images:
                self.loses_images = False
                error = AttachmentMissing("an image is missing").info()
                self._send(client, Refused(request=message.request, error=error))
            case Generate():
                self._generate(client, message)
            case Encode():
                self._encode(client, message)
            case Abort(requests=numbers, reason=reason):
                self.abort_reasons.update(dict.fromkeys(numbers, reason))
                self._abort(client, numbers)
            case AbortByLabel():
                self._abort_named(client, message)
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(client, message)
            case KeepKV(handles=handles):
                self.kept += handles
            case ReleaseKV(handles=handles):
                self.released += handles
            case Goodbye():
                self.goodbyes += 1
                self._talks = {key: t for key, t in self._talks.items() if key[0] != client}
            case GetTimeline() if self.timelines_error is not None:
                self._send(client, Refused(request=message.request, error=self.timelines_error))
            case GetTimeline():
                found = [self.timelines[name] for name in message.names if name in self.timelines]
                self._send(
                    client,
                    RequestTimelines(
                        request=message.request, timelines=found, kept=1000, kept_s=900.0
                    ),
                )
            case GetStatus():
                self.num_polls += 1
                self._send(
                    client,
                    EngineStatus(
                        request=message.request,
                        now_s=time.monotonic(),
                        stats=self.stats,
                        num_open=len(self.rows),
                        rows=self.rows,
                    ),
                )
            case Drain():
                raise AssertionError("a gateway does not drain its engine")

    def _abort(self, client: bytes, numbers: list[int]) -> None:
        for number in numbers:
            self.aborts[number] = time.monotonic()
            if not self.ignores_aborts and (client, number) in self._talks:
                del self._talks[client, number]
                end = Output(request=number, finish="abort")
                self._send(client, Outputs(step=0, outputs=[end]))
                self._send(client, ResourcesFreed(requests=[number]))

    def _abort_named(self, client: bytes, message: AbortByLabel) -> None:
        known = {name for talk in self._talks.values() for name in talk.message.labels}
        for key, talk in list(self._talks.items()):
            if not set(message.names).isdisjoint(talk.message.labels):
                del self._talks[key]
                end = Output(request=talk.message.request, finish="abort")
                self._send(talk.client, Outputs(step=0, outputs=[end]))
        aborted = [name for name in message.names if name in known]
        unknown = [name for name in message.names if name not in known]
        self._send(client, Aborted(request=message.request, aborted=aborted, unknown=unknown))

    def _change_adapters(self, client: bytes, message: LoadAdapter | UnloadAdapter) -> None:
        found = [info for info in self.adapters if info.name == message.name]
        reply: AdapterChanged | Refused
        if isinstance(message, LoadAdapter) and not found:
            info = AdapterInfo(name=message.name, digest="d1", rank=8, path=message.path)
            self.adapters = [*self.adapters, info]
            reply = AdapterChanged(request=message.request, adapter=info)
        elif isinstance(message, UnloadAdapter) and found:
            self.adapters = [info for info in self.adapters if info not in found]
            reply = AdapterChanged(request=message.request, adapter=found[0])
        elif isinstance(message, LoadAdapter):
            error = InvalidRequest.at("lora_name", "it is loaded already").info()
            reply = Refused(request=message.request, error=error)
        else:
            error = UnknownModel("there is no such adapter", param="lora_name").info()
            reply = Refused(request=message.request, error=error)
        self._send(client, Adapters(adapters=self.adapters))
        self._send(client, reply)

    def _adapter_error(self, message: Generate) -> ServingError | None:
        """Return the refusal of a request whose adapter was unloaded or replaced. If a test changes
        `adapters`, clients do not learn it before such a refusal."""
        if not message.adapter:
            return None
        digests = [info.digest for info in self.adapters if info.name == message.adapter]
        if not digests:
            return UnknownModel("there is no such adapter", param="model")
        if message.adapter_digest and message.adapter_digest not in digests:
            return StaleAdapter("the adapter was replaced: try again", retry_after_s=1)
        return None

    def _welcome(self) -> Welcome:
        limits = Limits(
            max_len=self.max_len,
            max_slots=8,
            block_tokens=BLOCK_TOKENS,
            num_blocks=64,
            token_budget=256,
            prefix_cache=True,
            kv_lease_s=self.kv_lease_s,
            state_bytes=self.state_bytes,
        )
        return Welcome(
            protocol=PROTOCOL_VERSION,
            epoch=self.epoch,
            model=self.card,
            limits=limits,
            adapters=self.adapters,
        )

    def _generate(self, client: bytes, message: Generate) -> None:
        self.generates.append(message)
        if (stale := self._adapter_error(message)) is not None:
            self._send(client, Adapters(adapters=self.adapters))
            self._send(client, Refused(request=message.request, error=stale.info()))
            if self.replaces_adapters:
                changed = (f"{info.digest}, replaced" for info in self.adapters)
                self.adapters = [
                    msgspec.structs.replace(info, digest=digest)
                    for info, digest in zip(self.adapters, changed, strict=True)
                ]
            return
        reply = (self.computes if message.kv_readers else self.script)(message)
        if isinstance(reply, ErrorInfo):
            self._send(client, Refused(request=message.request, error=reply))
            return
        # Steps are not copied, because the engine sends nothing while it copies megabytes.
        talk = _Talk(client, message, deque(reply.steps), reply)
        self._talks[client, message.request] = talk
        self._send(client, Accepted(request=message.request))

    def _encode(self, client: bytes, message: Encode) -> None:
        self.encodes.append(message)
        if (refusal := self.refuses(message)) is not None:
            self._send(client, Refused(request=message.request, error=refusal))
            return
        talk = _Talk(client, message, deque(), TokenReply([]))
        self._talks[client, message.request] = talk
        self._send(client, Accepted(request=message.request))

    def _step(self) -> None:
        by_client: dict[bytes, list[Output]] = {}
        self.num_steps += bool(self._talks)  # first: all steps are counted once no talk is open
        for key, talk in list(self._talks.items()):
            output = (
                self._encoded(talk.message) if isinstance(talk.message, Encode) else _output(talk)
            )
            by_client.setdefault(talk.client, []).append(output)
            if output.finish is not None:
                del self._talks[key]
        for client, outputs in by_client.items():
            load = EngineLoad(len(self._talks), 0, 0)
            self._send(client, Outputs(step=self.num_steps, outputs=outputs, load=load))

    def _encoded(self, message: Encode) -> Output:
        encoding, inputs = self.card.encoding, message.inputs
        assert encoding is not None
        lengths, tokens = inputs.lengths.tolist(), inputs.tokens.tolist()
        ends = [*accumulate(lengths)]
        rows = [
            scripted_vector(tokens[end - length : end], encoding.size)
            for end, length in zip(ends, lengths, strict=True)
        ]
        return Output(
            request=message.request,
            finish="stop",
            vectors=Float32.of(chain.from_iterable(rows), (len(rows), encoding.size)),
            usage=Usage(prompt_tokens=ends[-1], generated_tokens=0, times=TIMES),
        )

    def _send(self, client: bytes, message: msgspec.Struct) -> None:
        try:
            self._socket.send_multipart([client, *codec.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the gateway has disconnected
                raise


def _output(talk: _Talk) -> Output:
    assert isinstance(talk.message, Generate)
    params, prompt = talk.message.params, talk.message.prompt.tolist()
    tokens = talk.steps.popleft() if talk.steps else []
    room = None if params.max_tokens is None else params.max_tokens - talk.num_generated
    finish, stop_token, error = None, None, None
    if room is not None and len(tokens) >= room:
        tokens, finish = tokens[:room], "length"
    elif not talk.steps:
        finish, stop_token, error = talk.reply.finish, talk.reply.stop_token, talk.reply.error
        if stop_token is not None:
            tokens = [*tokens, stop_token]
    talk.num_generated += len(tokens)
    is_first, talk.has_output = not talk.has_output, True
    count, top = params.prompt_logprobs, params.logprobs
    return Output(
        request=talk.message.request,
        tokens=tokens,
        logprobs=[] if top is None else [scripted_logprob(t, top) for t in tokens],
        prompt_logprobs=[scripted_logprob(t, count) for t in prompt[1:]]
        if is_first and count is not None
        else [],
        finish=finish,  # type: ignore[arg-type]
        stop_token=stop_token,
        usage=_usage(talk),
        error=error,
        mirostat_mu=float(talk.num_generated) if params.mirostat and finish is None else None,
        kv_handle=handle_of(talk.message) if finish == "length" and talk.message.kv_readers else "",
    )


def handle_of(message: Generate) -> str:
    """Return a scripted engine's handle of the K/V of a request."""
    return f"handle-{message.request}"


TIMES = Times(queued_s=0.25, prefill_s=0.5, decode_s=2.0)
"""The times that a scripted engine reports for every request."""


def _usage(talk: _Talk) -> Usage:
    num_prompt = len(talk.message.prompt)
    fetched = num_prompt - 1 if talk.message.kv_handle else 0
    return Usage(
        prompt_tokens=num_prompt,
        generated_tokens=talk.num_generated,
        cached_tokens=fetched or 2,
        fetched_tokens=fetched,
        times=TIMES,
    )


def scripted_logprob(token: int, num_top: int) -> TokenLogprobs:
    """Return logprobs that a test can predict: they are a function of the token id."""
    ids = [(token + place) % 256 for place in range(num_top)]
    likelihoods = [-token / 64 - place for place in range(num_top)]
    return TokenLogprobs(token, -token / 64, 1, ids, likelihoods)
