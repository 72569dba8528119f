"""What a gateway is told: its engines, who may come in, the API's bounds, and what is kept."""

from __future__ import annotations

from typing import Annotated

from protocol.config.base import Config, LogFormat, OnFailure, SharedKey, about
from protocol.hosts import is_loopback
from protocol.model_card import sampling_defaults

NO_STORE = "none"
"""Instead of a file's name."""


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
    cluster_key: SharedKey = ""
    kv_on_failure: Annotated[
        OnFailure,
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
    metrics_directory: Annotated[
        str,
        about("folder in which the processes of one port count together", wiring=True),
    ] = ""
    tried_tokenizer: Annotated[
        str,
        about("SHA-256 of a tokenizer.json that needs no trial, as it has passed one", wiring=True),
    ] = ""
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
    log_format: LogFormat = "text"
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
    default_sampling: Annotated[
        str,
        about(
            "JSON object with sampling parameters for requests that do not set them, such as "
            '{"temperature": 0.2, "top_p": 0.9}; they win over what the model recommends'
        ),
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
        try:
            sampling_defaults(self.default_sampling)
        except ValueError as error:
            raise ValueError(f"default_sampling: {error}") from None
        self._make_absolute("chat_template", "api_keys")
        if self.response_store != NO_STORE:
            self._make_absolute("response_store")
        if not (is_loopback(self.host) or self.has_keys or self.insecure_no_auth):
            raise ValueError(
                f"on host {self.host} other machines could use this server without a key: give it "
                "api_keys or $TIDEGATE_API_KEY, or say insecure_no_auth"
            )
