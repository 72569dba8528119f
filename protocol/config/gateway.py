"""The gateway's config: its models and their engines, authentication, limits, timeouts, storage."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, LogFormat, OnFailure, SharedKey, about
from protocol.engine.model_card import sampling_defaults
from protocol.wire.loopback import is_loopback

ENVIRONMENT_VARIABLE = "TIDEGATE_GATEWAY"
"""The environment variable in which a gateway process receives its config, as JSON."""

Load = Literal["start", "first-use"]
"""When a model is loaded: when the server starts, or when a request first needs it."""

# Fields that both a server with one model and each of several models have.
EngineAddress = Annotated[str, about("address of the engine (ZeroMQ)", wiring=True)]
CardFilePath = Annotated[
    str, about("file with the model card; serves without an engine", wiring=True)
]
PrefillAddresses = Annotated[
    list[str], about("addresses of prefill engines (ZeroMQ); needs `decode`", wiring=True)
]
DecodeAddresses = Annotated[
    list[str], about("addresses of decode engines (ZeroMQ), in place of `engine`", wiring=True)
]
ReplicaAddresses = Annotated[
    list[str], about("addresses of replicas (ZeroMQ), in place of `engine`", wiring=True)
]
ReplicaFile = Annotated[
    str, about("file with more addresses of replicas, read again when it changes", wiring=True)
]
TriedTokenizer = Annotated[
    str, about("SHA-256 of a tokenizer.json that passed its trial run, to skip it", wiring=True)
]
ExpectedCard = Annotated[
    str, about("card file of the model that the engine loads, to prepare it early", wiring=True)
]
ServedNames = Annotated[
    list[str],
    about("model name in the API; repeat for aliases; default: the model's own", metavar="NAME"),
]
ChatTemplate = Annotated[
    str, about("file with a chat template to use in place of the model's own", path="file")
]
DefaultTemplateKwargs = Annotated[
    str, about("JSON object of chat template variables for requests that do not set them")
]
DefaultSampling = Annotated[
    str,
    about(
        "JSON object of sampling parameters for requests that do not set them, such as "
        '{"temperature": 0.2, "top_p": 0.9}; overrides the model\'s recommendations'
    ),
]
ToolFormat = Annotated[
    str,
    about(
        "syntax of the model's tool calls: a name from docs/use/formats.md, or auto",
        metavar="FORMAT",
    ),
]
ReasoningFormat = Annotated[
    str,
    about(
        "syntax of the model's reasoning: a name from docs/use/formats.md, auto, or none",
        metavar="FORMAT",
    ),
]


class ModelConfig(Config, frozen=True, kw_only=True):
    """One of the models of a gateway: its names, its engines, and how its requests are prepared."""

    served_name: ServedNames = []
    key: Annotated[
        str,
        about("name of the model in the supervisor; default: the first served name", wiring=True),
    ] = ""
    load: Annotated[Load, about("when the model is loaded", wiring=True)] = "start"
    engine: EngineAddress = ""
    card: CardFilePath = ""
    prefill: PrefillAddresses = []
    decode: DecodeAddresses = []
    engines: ReplicaAddresses = []
    engines_file: ReplicaFile = ""
    tried_tokenizer: TriedTokenizer = ""
    expected_card: ExpectedCard = ""
    chat_template: ChatTemplate = ""
    default_chat_template_kwargs: DefaultTemplateKwargs = ""
    default_sampling: DefaultSampling = ""
    tool_format: ToolFormat = "auto"
    reasoning_format: ReasoningFormat = "auto"

    @property
    def supervised_name(self) -> str:
        """The name by which the supervisor loads and unloads the model."""
        return self.key or (self.served_name[0] if self.served_name else "model")

    @property
    def names_formats(self) -> bool:
        """Whether the format of tool calls or of reasoning is given, not found for each model."""
        return (self.tool_format, self.reasoning_format) != ("auto", "auto")

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                "prefill and decode must be set together: prefill engines compute prompts, and"
                " decode engines continue from them"
            )
        if self.decode and (self.engines or self.engines_file):
            raise ValueError("engines cannot be combined with prefill and decode")
        try:
            sampling_defaults(self.default_sampling)
        except ValueError as error:
            raise ValueError(f"default_sampling: {error}") from None
        self._make_absolute("chat_template", "engines_file")


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The process that serves HTTP and converts between text and tokens."""

    models: Annotated[
        list[ModelConfig],
        about("the models of a server with several, in place of this config's own", wiring=True),
    ] = []
    control: Annotated[
        str, about("path of the supervisor's socket, to load and unload models", wiring=True)
    ] = ""
    engine: EngineAddress = ""
    card: CardFilePath = ""
    prefill: PrefillAddresses = []
    decode: DecodeAddresses = []
    engines: ReplicaAddresses = []
    engines_file: ReplicaFile = ""
    failover_s: Annotated[
        float,
        about(
            "seconds that open requests of a lost engine wait for another one, if there are "
            "several engines and none is ready",
            ge=0,
            le=86400,
        ),
    ] = 30.0
    cluster_key: SharedKey = ""
    kv_on_failure: Annotated[
        OnFailure,
        about(
            "if a prompt cannot be handed to the decode engine: recompute it, or fail", wiring=True
        ),
    ] = "recompute"
    split_min_tokens: Annotated[
        int,
        about(
            "shortest prompt sent to a prefill engine; decode engines compute shorter ones",
            ge=2,
            le=1 << 24,
        ),
    ] = 64
    host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    port: Annotated[int, about("HTTP port to listen on", ge=1, le=65535, metavar="PORT")] = 8000
    gateways: Annotated[
        int, about("number of gateway processes that share the port", ge=1, le=64)
    ] = 1
    api_keys: Annotated[
        str,
        about(
            "file with the clients' API keys, made by `tidegate keys`; reloaded when it changes",
            path="file",
        ),
    ] = ""
    api_key: Annotated[
        list[str],
        about(
            "API key with all permissions; repeat for several; $TIDEGATE_API_KEY is safer, because "
            "it is not visible in `ps`",
            secret=True,
            metavar="KEY",
        ),
    ] = []
    api_key_digests: Annotated[
        list[str], about("digests of the API keys, passed in place of the keys", wiring=True)
    ] = []
    metrics_directory: Annotated[
        str, about("directory in which the gateways of a port combine their metrics", wiring=True)
    ] = ""
    tried_tokenizer: TriedTokenizer = ""
    expected_card: ExpectedCard = ""
    supervisor_digest: Annotated[
        str,
        about("digest of the API key that the supervisor uses to check this gateway", wiring=True),
    ] = ""
    insecure_no_auth: Annotated[
        bool, about("allow a --host that other machines can reach, although there is no API key")
    ] = False
    public_metrics: Annotated[
        bool,
        about(
            "answer /metrics without an API key, for scrapers that cannot send one, such as "
            "endpoint pickers"
        ),
    ] = False
    allowed_host: Annotated[
        list[str],
        about(
            "also accept this name in the Host header, besides IP addresses and loopback names; "
            "repeat for several; default: none if listening on loopback, else any name",
            metavar="HOST",
        ),
    ] = []
    cors_origin: Annotated[
        list[str],
        about(
            "origin of web pages that may call this server, or * for any; repeat for several",
            metavar="ORIGIN",
        ),
    ] = []
    web: Annotated[
        bool,
        about(
            "serve a web page at / to chat, compare and watch, and a reference of the API at /docs"
        ),
    ] = True
    served_name: ServedNames = []
    manage_models: Annotated[
        bool,
        about(
            "let keys with the scope admin download, copy and delete models while the server runs, "
            "over Ollama's API and on the web page"
        ),
    ] = False
    max_body_mib: Annotated[int, about("largest request body", ge=1, le=1024)] = 16
    body_memory_mib: Annotated[
        int,
        about(
            "memory of a gateway process for request bodies above 256 KiB, while they arrive and"
            " while their requests run; 0: eight times max_body_mib",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    max_n: Annotated[int, about("most choices (n) in one request", ge=1, le=1024)] = 128
    max_prompts: Annotated[
        int, about("most prompts in one completions request", ge=1, le=65536)
    ] = 1024
    keep_alive_s: Annotated[
        float, about("send a keep-alive on streams silent for this many seconds", ge=0.1, le=3600)
    ] = 15.0
    idle_timeout_s: Annotated[
        int,
        about(
            "close a connection without a request after this many seconds; must be longer than "
            "proxies and clients keep an unused connection",
            ge=1,
            le=3600,
        ),
    ] = 75
    send_timeout_s: Annotated[
        float,
        about(
            "disconnect a streaming client that reads nothing for this many seconds",
            ge=0.1,
            le=3600,
        ),
    ] = 60.0
    timeout_s: Annotated[
        float,
        about(
            "end a request after this many seconds, unless it sets its own timeout_s; 0: no limit",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    queue_timeout_s: Annotated[
        float,
        about(
            "refuse a request with 429 if it has not started after this many seconds, unless "
            "it sets its own queue_timeout_s; 0: no limit",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    load_timeout_s: Annotated[
        float,
        about(
            "refuse a request with 503 if its model is not loaded after this many seconds",
            ge=1,
            le=86400,
        ),
    ] = 600.0
    drain_s: Annotated[
        float, about("seconds that open streams may continue after SIGTERM", ge=0, le=86400)
    ] = 30.0
    log_requests: Annotated[bool, about("log one line per request")] = True
    log_format: LogFormat = "text"
    log_content: Annotated[
        bool, about("log failures in full, possibly with parts of prompts and answers")
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        about(
            "URL that receives request traces (OpenTelemetry, OTLP over HTTP), such as "
            "http://127.0.0.1:4318/v1/traces; needs the extra otel"
        ),
    ] = ""
    chat_template: ChatTemplate = ""
    trust_request_chat_template: Annotated[
        bool, about("allow requests to bring their own chat template")
    ] = False
    image_urls: Annotated[
        list[str],
        about(
            "also load images that requests name by an http(s): URL, from this host (or "
            "HOST:PORT); repeat for several; default: none, so that images must be in the requests",
            metavar="HOST",
        ),
    ] = []
    preprocessed_images_mib: Annotated[
        int,
        about(
            "MiB for preprocessed images in each gateway process: those of open requests, and the "
            "last ones",
            ge=1,
            le=1 << 16,
        ),
    ] = 512
    default_chat_template_kwargs: DefaultTemplateKwargs = ""
    default_sampling: DefaultSampling = ""
    tool_format: ToolFormat = "auto"
    reasoning_format: ReasoningFormat = "auto"
    reasoning_fields: Annotated[
        Literal["both", "reasoning", "reasoning_content"],
        about(
            "name of a chat message's reasoning: some clients read one name, some the other, and a "
            "few show the text twice if it has both"
        ),
    ] = "both"

    response_store: Annotated[
        str,
        about(
            "SQLite file that stores responses, shared by all gateways; none: do not store "
            "them; default: responses/PORT.db in $TIDEGATE_HOME",
            path="new file",
        ),
    ] = ""
    response_store_mib: Annotated[
        int,
        about(
            "size limit of the response store; the least recently used are deleted",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024
    response_store_days: Annotated[
        float, about("delete stored responses unused for this many days", ge=0.001, le=36500)
    ] = 30.0
    file_store: Annotated[
        str,
        about(
            "SQLite file that stores uploaded files and batches, shared by all gateways; none: no "
            "files and no batches; default: files/PORT.db in $TIDEGATE_HOME",
            path="new file",
        ),
    ] = ""
    file_store_mib: Annotated[
        int,
        about(
            "size limit of the file store; at this size uploads and new batches are refused, and "
            "open batches pause",
            ge=1,
            le=1 << 24,
        ),
    ] = 4096
    file_max_mib: Annotated[int, about("largest uploaded file", ge=1, le=1 << 16)] = 200
    files_per_key: Annotated[int, about("most uploaded files of one API key", ge=1, le=1 << 20)] = (
        1000
    )
    file_days: Annotated[
        float,
        about(
            "delete uploaded files, results and ended batches after this many days, unless a "
            "request sets another time",
            ge=0.001,
            le=36500,
        ),
    ] = 30.0
    batch_max_lines: Annotated[int, about("most lines of a batch", ge=1, le=1 << 24)] = 50_000
    batches_per_key: Annotated[int, about("most open batches of one API key", ge=1, le=1 << 20)] = (
        100
    )
    batch_concurrency: Annotated[
        int,
        about(
            "most lines of batches that a gateway process sends to engines at the same time; "
            "0: as many as an engine has slots",
            ge=0,
            le=4096,
        ),
    ] = 0
    resume_s: Annotated[
        float,
        about(
            "seconds that a resumable stream continues and is kept without a client", ge=0, le=86400
        ),
    ] = 60.0

    @staticmethod
    def from_environment() -> GatewayConfig:
        """Return the config of this process; the defaults if the variable is not set."""
        text = os.environ.get(ENVIRONMENT_VARIABLE, "{}")
        return msgspec.json.decode(text, type=GatewayConfig)

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that passes this config to a gateway process."""
        return {ENVIRONMENT_VARIABLE: msgspec.json.encode(self).decode()}

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys or self.api_key or self.api_key_digests)

    @property
    def has_several(self) -> bool:
        """Whether requests choose among several models, or may do so later."""
        return len(self.models) > 1 or self.manage_models

    @property
    def body_memory_bytes(self) -> int:
        """The memory for large request bodies."""
        return (self.body_memory_mib or 8 * self.max_body_mib) << 20

    @property
    def hosted(self) -> list[ModelConfig]:
        """The models to serve: `models`, or the one model that this config describes itself."""
        return self.models or [self.own_model]

    @property
    def own_model(self) -> ModelConfig:
        """The one model that this config describes itself, or the options of all its models."""
        names = set(ModelConfig.__struct_fields__) & set(GatewayConfig.__struct_fields__)
        return ModelConfig(**{name: getattr(self, name) for name in names})

    def __post_init__(self) -> None:
        self._make_absolute("chat_template", "api_keys", "engines_file")
        self._make_absolute("response_store", "file_store")
        _check_names(self.hosted)
        if self.body_memory_mib and self.body_memory_mib < 2 * self.max_body_mib:
            raise ValueError(
                f"body_memory_mib ({self.body_memory_mib}) is less than twice max_body_mib"
                f" ({self.max_body_mib}), although one client may use only half of it"
            )
        if not (is_loopback(self.host) or self.has_keys or self.insecure_no_auth):
            raise ValueError(
                f"host {self.host} is reachable from other machines, but no API key is set: set "
                "api_keys or $TIDEGATE_API_KEY, or allow it with insecure_no_auth"
            )


def _check_names(models: list[ModelConfig]) -> None:
    """Raise ValueError if one of several models has no name, or if two have the same one."""
    owners: dict[str, int] = {}
    for place, model in enumerate(models):
        if len(models) > 1 and not model.served_name:
            raise ValueError(f"models[{place}] has no served_name, which several models need")
        for name in model.served_name:
            if owners.setdefault(name, place) != place:
                raise ValueError(f"two models have the served_name {name!r}")
