"""One frozen struct per process: every field described and bounded, defaults written once.

`tidegate serve` generates its options from these declarations (`wiring=True` fields, which only
connect processes, are left out), so flags, help and documentation cannot drift from the code.
What is discovered at run time (how many blocks fit, the real context length) is never written back
here; it travels in `steps.WorkerReady` and `messages.Welcome`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.hosts import is_loopback

Dtype = Literal["auto", "bfloat16", "float32"]
Poisoning = Literal["off", "zeros", "plausible", "wild"]
KernelSet = Literal["auto", "avx512bf16", "avx512", "avx2", "generic", "torch"]
WeightForm = Literal["auto", "packed", "dense"]
NO_STORE = "none"
"""Instead of a file's name."""


def about(description: str, *, wiring: bool = False, **bounds: Any) -> Meta:
    """The one way to describe a field. `wiring` fields connect processes and are no user option."""
    return Meta(description=description, extra={"wiring": wiring}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configs: immutable, keyword-only; a misspelt field is refused by name."""


class WorkerConfig(Config, frozen=True, kw_only=True):
    """The process that holds the tensors."""

    model: Annotated[
        str,
        about(
            "a Hugging Face directory, a .gguf file, or a name from `tidegate models`",
            wiring=True,
        ),
    ]
    address: Annotated[str, about("where the engine awaits this worker (ZeroMQ)", wiring=True)] = ""
    draft_model: Annotated[
        str,
        about(
            "a smaller model with the same tokenizer, named as MODEL is, which guesses ahead for "
            "--speculation model"
        ),
    ] = ""
    device: Annotated[Literal["auto", "cpu", "cuda"], about("where to compute")] = "auto"
    dtype: Annotated[
        Dtype,
        about("of weights and KV cache; auto: bfloat16 where the hardware has it, else float32"),
    ] = "auto"
    threads: Annotated[
        int, about("CPU threads for tensor work; 0: one per core allowed to us", ge=0, le=1024)
    ] = 0
    kernels: Annotated[
        KernelSet,
        about(
            "what computes on a CPU: our kernels for an instruction set, or torch's; "
            "auto: the best that is compiled and that the processor has"
        ),
    ] = "auto"
    weights: Annotated[
        WeightForm,
        about(
            "packed: as the file has them, quantised or not, for our kernels; dense: as numbers "
            "of dtype, for torch; auto: packed, and beside them dense for steps of many rows, "
            "where measuring shows that this is faster and there is room"
        ),
    ] = "auto"
    measurements: Annotated[
        str,
        about(
            "folder where it is kept how fast this machine computes; none: measured", wiring=True
        ),
    ] = ""
    max_slots: Annotated[int, about("requests computed at once", ge=1, le=4096)] = 64
    max_len: Annotated[
        int,
        about(
            "most tokens of prompt and answer together; 0: the model's own limit", ge=0, le=1 << 24
        ),
    ] = 0
    block_tokens: Annotated[int, about("tokens in one KV block; a power of two", ge=1, le=256)] = 16
    kv_blocks: Annotated[
        int, about("blocks in the KV cache; 0: as many as kv-memory-gib holds", ge=0, le=1 << 24)
    ] = 0
    kv_memory_gib: Annotated[
        float,
        about(
            "memory for the KV cache; 0: enough for max-slots average requests, "
            "at most a quarter of what is free",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    poison_slots: Annotated[
        Poisoning,
        about(
            "for tests: what a slot holds while nobody owns it, so that whoever reads what is not "
            "its own goes visibly wrong; the worker then also looks for per-slot tensors that its "
            "slot table does not know"
        ),
    ] = "off"

    kv_host_gib: Annotated[
        float,
        about(
            "host memory for blocks that the KV cache has no room for any more, to be loaded again "
            "instead of computed; 0: none",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    kv_disk: Annotated[
        str,
        about(
            "directory where computed blocks are kept over restarts, readable by its owner only; "
            "several servers may share it. Default: nothing is kept"
        ),
    ] = ""
    kv_disk_gib: Annotated[
        float, about("most that kv-disk may hold, of all models together", ge=0.001, le=1 << 24)
    ] = 16.0
    kv_export: Annotated[
        bool, about("other workers may fetch K/V from this one (kv.py)", wiring=True)
    ] = False
    kv_address: Annotated[
        str, about("where other workers ask for K/V of this one (ZeroMQ)", wiring=True)
    ] = ""
    kv_mover: Annotated[
        Literal["auto", "shm", "zmq", "nixl"],
        about(
            "how K/V travels between workers: shm through shared memory of one host, zmq over any "
            "ZeroMQ address, nixl where that library is installed; auto: shm where it can, else zmq"
        ),
    ] = "auto"
    cluster_key: Annotated[
        str, about("a file with the key that the engines of one cluster share", wiring=True)
    ] = ""

    def __post_init__(self) -> None:
        if self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens ({self.block_tokens}) must be a power of two")
        if self.kv_disk:  # the worker does not work where the user typed this
            msgspec.structs.force_setattr(self, "kv_disk", os.path.abspath(self.kv_disk))


class EngineConfig(Config, frozen=True, kw_only=True):
    """The process that decides."""

    worker: Annotated[WorkerConfig, about("the workers of this replica", wiring=True)]
    address: Annotated[str, about("where clients find this engine (ZeroMQ)", wiring=True)] = ""
    token_budget: Annotated[
        int, about("most tokens computed in one step, over all requests", ge=1, le=1 << 20)
    ] = 256
    steps_in_flight: Annotated[
        int,
        about("steps sent to the worker before the first of them has come back", ge=1, le=2),
    ] = 2
    prefix_cache: Annotated[bool, about("reuse computed blocks of equal prompts")] = True
    speculation: Annotated[
        Literal["none", "ngram", "model"],
        about(
            "guess tokens ahead and verify them; ngram: from what the request has said before; "
            "model: by the draft model"
        ),
    ] = "none"
    max_drafts: Annotated[
        int, about("most tokens guessed ahead in one step, per request", ge=1, le=64)
    ] = 8
    ngram_min: Annotated[
        int, about("tokens that must be as they were before, to guess what follows", ge=1, le=32)
    ] = 2
    ngram_max: Annotated[
        int, about("of several such places the one wins where more are, up to so many", ge=1, le=64)
    ] = 8
    draft_width: Annotated[
        int,
        about(
            "tokens with which a step takes about twice as long as with none: few guesses are made "
            "where that many are computed anyway; 0: what a step costs is measured (32 where it "
            "cannot be)",
            ge=0,
            le=1 << 16,
        ),
    ] = 0
    role: Annotated[
        Literal["both", "prefill", "decode"],
        about(
            "prefill: compute prompts for other engines; decode: go on from such prompts, and "
            "compute what nobody else has; both"
        ),
    ] = "both"
    cluster_key: Annotated[
        str, about("a file with the key that the engines of one cluster share", wiring=True)
    ] = ""
    kv_lease_s: Annotated[
        float, about("K/V that is kept for another engine is given up after so long", ge=1, le=3600)
    ] = 30.0
    kv_timeout_s: Annotated[
        float, about("K/V that takes longer to fetch has failed", ge=0.1, le=3600)
    ] = 10.0
    kv_on_failure: Annotated[
        Literal["recompute", "error"],
        about("what becomes of a request whose K/V cannot be fetched"),
    ] = "recompute"
    kv_load_tokens: Annotated[
        int,
        about(
            "of a prompt that kv-host-gib or kv-disk still has, fewer tokens are computed, and not "
            "loaded",
            ge=1,
            le=1 << 24,
        ),
    ] = 64
    max_waiting: Annotated[
        int, about("requests that may wait; more are refused with 429", ge=1, le=1 << 20)
    ] = 1024
    max_waiting_tokens: Annotated[
        int, about("prompt tokens that may wait; more are refused with 429", ge=1, le=1 << 30)
    ] = 2_000_000
    priority_s: Annotated[
        float,
        about(
            "of two requests that wait, the more important one goes first if it came less than so "
            "much later; the closer their priorities, the less",
            ge=0,
            le=86400,
        ),
    ] = 60.0
    grammar_timeout_s: Annotated[
        float,
        about(
            "a grammar (JSON schema, ...) that takes longer to compile is refused", ge=0.1, le=600
        ),
    ] = 10.0
    lease_s: Annotated[
        float,
        about("a client silent for so long is gone: its requests are aborted", ge=0.5, le=3600),
    ] = 6.0
    step_timeout_s: Annotated[
        float, about("a worker silent for so long within one step has failed", ge=1, le=86400)
    ] = 300.0
    stopped_timeout_s: Annotated[
        float,
        about("a worker that was stopped by a signal for so long is lost", ge=0.5, le=86400),
    ] = 4.0
    journal: Annotated[
        str,
        about(
            "directory for what `tidegate replay` reads: all that comes to the engine, with token "
            "ids, which are what people wrote. Default: nothing is kept"
        ),
    ] = ""
    journal_mib: Annotated[
        int, about("largest journal; of several, the newest four are kept", ge=1, le=1 << 20)
    ] = 256

    def __post_init__(self) -> None:
        if self.journal and self.cluster_key:
            raise ValueError("journal: an engine of a cluster, or of --split, has none")
        if self.journal:  # the engine does not work where the user typed this
            msgspec.structs.force_setattr(self, "journal", os.path.abspath(self.journal))
        if (self.speculation == "model") != bool(self.worker.draft_model):
            raise ValueError("speculation 'model' and draft_model need one another")
        if not self.prefix_cache and (self.worker.kv_host_gib or self.worker.kv_disk):
            raise ValueError(
                "kv_host_gib and kv_disk keep what the prefix_cache has found: turn it on"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) is more than ngram_max")


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The process that speaks HTTP and text."""

    engine: Annotated[str, about("the engine's address (ZeroMQ)", wiring=True)] = ""
    card: Annotated[
        str, about("a file with the model's card: serve without an engine", wiring=True)
    ] = ""
    prefill: Annotated[
        list[str], about("instead of `engine`: those that compute prompts (ZeroMQ)", wiring=True)
    ] = []
    decode: Annotated[
        list[str], about("those that go on from such prompts (ZeroMQ)", wiring=True)
    ] = []
    cluster_key: Annotated[
        str, about("a file with the key that the engines of one cluster share", wiring=True)
    ] = ""
    kv_on_failure: Annotated[
        Literal["recompute", "error"],
        about("what becomes of a request whose prompt cannot be handed over", wiring=True),
    ] = "recompute"
    split_min_tokens: Annotated[
        int,
        about(
            "with prefill and decode engines: shorter prompts are computed where they are decoded",
            ge=2,
            le=1 << 24,
        ),
    ] = 64
    host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    port: Annotated[int, about("HTTP port", ge=1, le=65535)] = 8000
    gateways: Annotated[int, about("gateway processes that share the port", ge=1, le=64)] = 1
    api_keys: Annotated[
        str,
        about("file with the keys that clients need (`tidegate keys`); read again when it changes"),
    ] = ""
    api_key: Annotated[
        list[str],
        about(
            "a key that opens everything; $TIDEGATE_API_KEY, which `ps` does not show, is better"
        ),
    ] = []
    api_key_digests: Annotated[list[str], about("of api_key, in its place", wiring=True)] = []
    supervisor_digest: Annotated[
        str, about("of a key that only the supervisor knows, to ask what is served", wiring=True)
    ] = ""
    insecure_no_auth: Annotated[bool, about("listen to other machines though no key is needed")] = (
        False
    )
    allowed_host: Annotated[
        list[str],
        about(
            "name that clients may use for this server, beside addresses and those of loopback; "
            "repeat for several. Default: on loopback none, elsewhere any"
        ),
    ] = []
    cors_origin: Annotated[
        list[str],
        about("origin whose web pages may use this server (https://app.example), or *; repeat"),
    ] = []
    served_name: Annotated[
        list[str],
        about("name of the model in the API; repeat for aliases. Default: the model's own name"),
    ] = []
    max_body_mib: Annotated[int, about("largest request body", ge=1, le=1024)] = 16
    max_n: Annotated[int, about("most choices (n) in one request", ge=1, le=1024)] = 128
    max_prompts: Annotated[
        int, about("most prompts in one completions request", ge=1, le=65536)
    ] = 1024
    keep_alive_s: Annotated[
        float, about("a comment is sent on a stream that was silent for so long", ge=0.1, le=3600)
    ] = 15.0
    send_timeout_s: Annotated[
        float,
        about("a client that takes nothing of its stream for so long is cut off", ge=0.1, le=3600),
    ] = 60.0
    timeout_s: Annotated[
        float,
        about(
            "a request that does not say timeout_s itself ends after so long; 0: no limit",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    queue_timeout_s: Annotated[
        float,
        about(
            "a request that does not say queue_timeout_s itself is refused with 429 when it was "
            "not begun after so long; 0: no limit",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    drain_s: Annotated[
        float, about("how long open streams may go on after SIGTERM", ge=0, le=86400)
    ] = 30.0
    log_requests: Annotated[bool, about("one log line per request")] = True
    log_format: Annotated[
        Literal["text", "json"],
        about("of the gateway's log lines; json: one object per line, with all that is measured"),
    ] = "text"
    log_content: Annotated[
        bool,
        about("log what failures say in full, which may be parts of what people wrote"),
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        about(
            "URL to which traces of requests are sent (OpenTelemetry, OTLP over HTTP: "
            "http://127.0.0.1:4318/v1/traces); needs the extra otel"
        ),
    ] = ""
    chat_template: Annotated[
        str, about("a file with the chat template to use; default: the model's own")
    ] = ""
    trust_request_chat_template: Annotated[
        bool, about("requests may bring a chat template of their own")
    ] = False
    default_chat_template_kwargs: Annotated[
        str, about("JSON object; what the chat template is told where a request says nothing")
    ] = ""
    tool_format: Annotated[
        str, about("how the model writes tool calls: a name of docs/formats.md, or auto")
    ] = "auto"
    reasoning_format: Annotated[
        str, about("how the model thinks aloud: a name of docs/formats.md, auto, or none")
    ] = "auto"

    response_store: Annotated[
        str,
        about(
            "file where responses are kept, which all gateways share; none: they are not kept. "
            "Default: responses/PORT.db in $TIDEGATE_HOME"
        ),
    ] = ""
    response_store_mib: Annotated[
        int, about("most that is kept; then the least used responses go", ge=1, le=1 << 20)
    ] = 1024
    response_store_days: Annotated[
        float, about("responses that nobody used for so long go", ge=0.001, le=36500)
    ] = 30.0
    resume_s: Annotated[
        float,
        about("how long a resumable stream goes on, and is kept, without a client", ge=0, le=86400),
    ] = 60.0

    @property
    def has_keys(self) -> bool:
        """Whether clients need one."""
        return bool(self.api_keys or self.api_key or self.api_key_digests)

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                "prefill and decode need each other: engines that compute prompts, and"
                " engines that go on from them"
            )
        for field in ("chat_template", "api_keys", "response_store"):
            path = getattr(self, field)
            if path and (field, path) != ("response_store", NO_STORE):
                # the gateway does not work where the user typed this
                msgspec.structs.force_setattr(self, field, os.path.abspath(path))
        if not (is_loopback(self.host) or self.has_keys or self.insecure_no_auth):
            raise ValueError(
                f"on host {self.host} other machines could use this server without a key: give it "
                "api_keys or $TIDEGATE_API_KEY, or say insecure_no_auth"
            )


class Restarting(Config, frozen=True, kw_only=True):
    """What the process that starts others does when one of them dies."""

    restart: Annotated[
        bool,
        about(
            "start an engine or a gateway that dies again, while the others serve on; without it "
            "all stop, with an exit code that tells the cause"
        ),
    ] = False
    restart_limit: Annotated[
        int,
        about("give up when there were so many restarts within five minutes", ge=1, le=1000),
    ] = 5

    @property
    def max_restarts(self) -> int:
        """0: none"""
        return self.restart_limit if self.restart else 0


class ServeConfig(Restarting, frozen=True, kw_only=True):
    """The process that starts and watches the others."""

    render_only: Annotated[
        bool,
        about(
            "only a gateway, without an engine: it renders, derenders and counts tokens, for which "
            "MODEL may be a directory of nothing but tokenizer.json and tokenizer_config.json"
        ),
    ] = False
    split: Annotated[
        bool,
        about(
            "two engines on this machine, one that computes prompts and one that goes on from "
            "them, with a cluster key made for this run: for trying it out"
        ),
    ] = False
    prefill: Annotated[
        list[str],
        about(
            "no engine of its own: prompts are computed by this one (tcp://HOST:PORT, as "
            "`tidegate engine` was told); repeat for more"
        ),
    ] = []
    decode: Annotated[
        list[str], about("with --prefill: answers come from this one; repeat for more")
    ] = []
    cluster_key: Annotated[
        str, about("the file with the cluster's key; `tidegate key FILE` makes one")
    ] = ""
    kv_address: Annotated[
        str,
        about(
            "with --cluster-key: where other hosts fetch what this engine has computed for them "
            "(tcp://HOST:PORT)"
        ),
    ] = ""
    start_timeout_s: Annotated[
        float, about("give up when not ready after so long", ge=1, le=86400)
    ] = 600.0

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode need each other")
        if self.render_only + self.split + bool(self.decode) > 1:
            raise ValueError("render_only, split and decode exclude each other")
        if self.split and (self.cluster_key or self.kv_address):
            raise ValueError(
                "split makes a key and addresses of its own: leave out cluster_key and kv_address"
            )
        if self.kv_address and not self.cluster_key:
            raise ValueError("kv_address needs cluster_key")


class SoloConfig(Restarting, frozen=True, kw_only=True):
    """The process that starts and watches one engine of a cluster."""

    address: Annotated[
        str,
        about("where gateways find this engine: tcp://HOST:PORT, 0.0.0.0 for every interface"),
    ] = "tcp://127.0.0.1:5600"
    kv_address: Annotated[
        str,
        about(
            "where other engines fetch what this one has computed for them: tcp://HOST:PORT, with "
            "a host that they reach. Without it, and with role decode, nobody does"
        ),
    ] = ""
    cluster_key: Annotated[
        str, about("the file with the cluster's key; `tidegate key FILE` makes one")
    ] = ""
    start_timeout_s: Annotated[
        float, about("give up when not ready after so long", ge=1, le=86400)
    ] = 600.0
    drain_s: Annotated[
        float, about("how long open requests may go on after SIGTERM", ge=0, le=86400)
    ] = 30.0

    def __post_init__(self) -> None:
        if not self.cluster_key:
            raise ValueError("cluster_key is missing: `tidegate key FILE` makes one")
