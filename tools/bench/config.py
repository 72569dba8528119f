"""The config of a benchmark. The options of `tidegate bench` are generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.config.base import Config, about

MIN_REQUESTS = 16
REQUESTS_PER_STREAM = 4
RATE_DURATION_S = 30.0
"""The default duration of a load that has a rate."""


class BenchLoad(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One load to measure, which gives one point of the latency curve.

    concurrency   number of streams; with a rate: the maximum number, or 0 for no maximum
    rate          requests per second; 0: each stream sends one request after another
    """

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:g}/s" + (f", at most {self.concurrency}" * bool(self.concurrency))
        return f"{self.concurrency} stream" + "s" * (self.concurrency != 1)


class BenchConfig(Config, frozen=True, kw_only=True):
    """The load to send, its prompts, and the output."""

    url: Annotated[str, about("the server", wiring=True)] = "http://127.0.0.1:8000"
    vs: Annotated[
        list[str],
        about(
            "compare with the server at this URL, under the same loads; repeat for several",
            metavar="URL",
        ),
    ] = []
    model: Annotated[
        str, about("model name; default: the server's first model", metavar="NAME")
    ] = ""
    api: Annotated[
        Literal["completions", "chat"],
        about("API to measure; only completions accepts prompts as token ids"),
    ] = "completions"
    header: Annotated[
        list[str],
        about(
            "send this header (NAME: VALUE) with each request; repeat for several", metavar="HEADER"
        ),
    ] = []

    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...],
        about(
            "number of concurrent streams; each number is a separate load (default 8); with "
            "--rate: maximum number of streams"
        ),
    ] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=1e5)], ...],
        about("requests per second, at random times (Poisson); each number is a separate load"),
    ] = ()
    requests: Annotated[
        int,
        about(
            f"number of requests per load; 0: {REQUESTS_PER_STREAM} per stream and at least "
            f"{MIN_REQUESTS}, or enough for {RATE_DURATION_S:g} s with --rate",
            ge=0,
            le=10_000_000,
        ),
    ] = 0
    duration_s: Annotated[
        float, about("seconds of each load; 0: use --requests", ge=0, le=86400)
    ] = 0.0
    rounds: Annotated[
        int, about("run every load this many times, and report its runs as one", ge=1, le=1000)
    ] = 1
    warm_up: Annotated[int, about("unmeasured requests before each load", ge=0, le=4096)] = 2

    dataset: Annotated[
        Literal["random", "shared-prefix", "file"],
        about(
            "prompts to send; random: random tokens; shared-prefix: random tokens after a shared "
            "prefix; file: the prompts in --file"
        ),
    ] = "random"
    file: Annotated[
        str, about("file of JSON lines, each with a prompt or messages, and optionally max_tokens")
    ] = ""
    input_tokens: Annotated[int, about("length of a random prompt", ge=1, le=1 << 24)] = 128
    output_tokens: Annotated[int, about("length of an answer", ge=1, le=1 << 24)] = 128
    spread: Annotated[
        float,
        about("vary lengths uniformly by up to this fraction", ge=0, le=0.99, metavar="FRACTION"),
    ] = 0.0
    prefix_tokens: Annotated[int, about("length of a shared prefix", ge=1, le=1 << 24)] = 1000
    prefixes: Annotated[int, about("number of different shared prefixes", ge=1, le=4096)] = 1
    prompt_as: Annotated[
        Literal["auto", "ids", "words"],
        about(
            "form of a random prompt; ids: token ids, of exact length; words: about one token per "
            "word, which any server accepts; auto: ids if the API accepts them"
        ),
    ] = "auto"
    vocabulary: Annotated[
        int, about("random token ids are below this number", ge=16, le=1 << 24)
    ] = 20_000
    ignore_eos: Annotated[
        Literal["auto", "yes", "no"],
        about("request answers of the exact length; auto: yes, except with --dataset file"),
    ] = "auto"
    temperature: Annotated[float, about("sampling temperature", ge=0, le=2)] = 0.0
    seed: Annotated[
        int,
        about(
            "seed of prompts and arrival times; 0: a new one, which is printed; with a seed used "
            "before, the server may find the prompts in its prefix cache",
            ge=0,
            le=1 << 48,
        ),
    ] = 0

    slo_ttft_ms: Annotated[
        float, about("objective for the time to first token; 0: none", ge=0, le=1e9)
    ] = 0.0
    slo_tpot_ms: Annotated[
        float, about("objective for the time per output token; 0: none", ge=0, le=1e9)
    ] = 0.0
    timeout_s: Annotated[
        float, about("give up an answer after this many seconds", gt=0, le=86400)
    ] = 600.0
    json: Annotated[str, about("file for all figures, as JSON", metavar="FILE")] = ""
    html: Annotated[str, about("file for an HTML page with plots", metavar="FILE")] = ""

    def __post_init__(self) -> None:
        if (self.dataset == "file") != bool(self.file):
            raise ValueError("file and the dataset of the same name must be used together")
        if self.requests and self.duration_s:
            raise ValueError("requests and duration_s cannot be used together")
        if self.rate and len(self.concurrency) > 1:
            raise ValueError("with rate, concurrency must be a single number")
        if self.api == "chat" and self.prompt_as == "ids":
            raise ValueError("prompt_as ids requires api completions")
        for header in self.header:
            if not header.partition(":")[2].strip() or not header.isprintable():
                raise ValueError(f"header {header!r} must have the form NAME: VALUE")

    @property
    def loads(self) -> list[BenchLoad]:
        """The loads to measure, in the order in which the options list them."""
        if self.rate:
            max_streams = self.concurrency[0] if self.concurrency else 0
            return [BenchLoad(rate=rate, concurrency=max_streams) for rate in self.rate]
        return [BenchLoad(concurrency=number) for number in self.concurrency or (8,)]

    def num_requests(self, load: BenchLoad) -> int | None:
        """Return the number of requests to send under `load`; None if `duration_s` limits it."""
        if self.duration_s:
            return None
        if self.requests:
            return self.requests
        if load.rate:
            return max(MIN_REQUESTS, round(load.rate * RATE_DURATION_S))
        return max(MIN_REQUESTS, REQUESTS_PER_STREAM * load.concurrency)

    @property
    def has_exact_length(self) -> bool:
        return self.ignore_eos == "yes" or (self.ignore_eos == "auto" and self.dataset != "file")

    @property
    def sends_ids(self) -> bool:
        return self.prompt_as == "ids" or (self.prompt_as == "auto" and self.api == "completions")


def run_order(config: BenchConfig) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (round, index of a load, indexes of all servers in the order to run it).

    Each load runs on every server before the next load starts. The order of the servers is reversed
    each time, so that a machine that gets warm or busy over time favours none of them.
    """
    servers = list(range(1 + len(config.vs)))
    num_yielded = 0
    for round_number in range(config.rounds):
        for load in range(len(config.loads)):
            yield round_number, load, servers if num_yielded % 2 == 0 else servers[::-1]
            num_yielded += 1
