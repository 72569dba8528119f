"""What a benchmark is asked to do: declared once; options, help and checks follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.config.base import Config, about

LEAST_REQUESTS = 16
REQUESTS_PER_STREAM = 4
RATE_LASTS_S = 30.0
"""Where nobody says how many requests there are."""


class BenchLoad(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One point of the curve: so many streams at once, or so many requests a second."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:g}/s" + (f", at most {self.concurrency}" * bool(self.concurrency))
        return f"{self.concurrency} stream" + "s" * (self.concurrency != 1)


class BenchConfig(Config, frozen=True, kw_only=True):
    """Which load is made, of which prompts, and what is told of it."""

    url: Annotated[str, about("the server", wiring=True)] = "http://127.0.0.1:8000"
    vs: Annotated[
        list[str],
        about("another server to compare with, under the same load in turn; may be repeated"),
    ] = []
    model: Annotated[str, about("its name in the API. Default: the first that the server has")] = ""
    api: Annotated[
        Literal["completions", "chat"], about("which streams; only completions take token ids")
    ] = "completions"
    header: Annotated[
        list[str], about("sent with each request, as NAME: VALUE; may be repeated")
    ] = []

    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...],
        about(
            "streams at once; each number is a load of its own. Default: 8. With --rate: at most "
            "so many"
        ),
    ] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=1e5)], ...],
        about("instead: requests a second, arriving at random (Poisson)"),
    ] = ()
    requests: Annotated[
        int,
        about(
            f"requests per load; 0: {REQUESTS_PER_STREAM} per stream and at least "
            f"{LEAST_REQUESTS}, or {RATE_LASTS_S:g} s of a rate",
            ge=0,
            le=10_000_000,
        ),
    ] = 0
    duration_s: Annotated[
        float, about("instead: requests are sent for so long per load", ge=0, le=86400)
    ] = 0.0
    rounds: Annotated[int, about("every load is run so often, and told as one", ge=1, le=1000)] = 1
    warm_up: Annotated[
        int, about("requests before each load that are not counted", ge=0, le=4096)
    ] = 2

    dataset: Annotated[
        Literal["random", "shared-prefix", "file"],
        about(
            "random: tokens at random; shared-prefix: the same, behind beginnings that requests "
            "share; file: what --file holds"
        ),
    ] = "random"
    file: Annotated[
        str, about("JSON lines with a prompt or messages each, and perhaps max_tokens")
    ] = ""
    input_tokens: Annotated[int, about("tokens of a random prompt", ge=1, le=1 << 24)] = 128
    output_tokens: Annotated[int, about("tokens of an answer", ge=1, le=1 << 24)] = 128
    spread: Annotated[float, about("lengths vary evenly by so large a share", ge=0, le=0.99)] = 0.0
    prefix_tokens: Annotated[int, about("tokens of a shared beginning", ge=1, le=1 << 24)] = 1000
    prefixes: Annotated[int, about("how many shared beginnings there are", ge=1, le=4096)] = 1
    prompt_as: Annotated[
        Literal["auto", "ids", "words"],
        about(
            "how a random prompt is sent: ids have an exact length, words (one token each, more "
            "or less) are understood by any server; auto: ids where the API takes them"
        ),
    ] = "auto"
    vocabulary: Annotated[int, about("random ids are below this number", ge=16, le=1 << 24)] = (
        20_000
    )
    ignore_eos: Annotated[
        Literal["auto", "yes", "no"],
        about(
            "ask for answers of exactly the length that was named, where the server knows how; "
            "auto: yes, but for --dataset file"
        ),
    ] = "auto"
    temperature: Annotated[float, about("of sampling", ge=0, le=2)] = 0.0
    seed: Annotated[
        int,
        about(
            "of prompts and arrivals; 0: another each time, which is told. A seed that was used "
            "before finds its prompts in the server's prefix cache",
            ge=0,
            le=1 << 48,
        ),
    ] = 0

    slo_ttft_ms: Annotated[
        float, about("a good answer's first token comes within; 0: whenever", ge=0, le=1e9)
    ] = 0.0
    slo_tpot_ms: Annotated[
        float, about("a good answer's time per further token is at most; 0: any", ge=0, le=1e9)
    ] = 0.0
    timeout_s: Annotated[float, about("an answer that takes longer has failed", gt=0, le=86400)] = (
        600.0
    )
    json: Annotated[str, about("a file to write all figures to")] = ""
    html: Annotated[str, about("a file to write a page with plots to")] = ""

    def __post_init__(self) -> None:
        if (self.dataset == "file") != bool(self.file):
            raise ValueError("dataset file and file go together")
        if self.requests and self.duration_s:
            raise ValueError("requests and duration_s exclude each other")
        if self.rate and len(self.concurrency) > 1:
            raise ValueError("with rate, concurrency is one number: the most streams at once")
        if self.api == "chat" and self.prompt_as == "ids":
            raise ValueError("prompt_as ids needs api completions")
        for header in self.header:
            if not header.partition(":")[2].strip() or not header.isprintable():
                raise ValueError(f"header {header!r} is not NAME: VALUE")

    @property
    def loads(self) -> list[BenchLoad]:
        """In the order in which they were named."""
        if self.rate:
            most = self.concurrency[0] if self.concurrency else 0
            return [BenchLoad(rate=rate, concurrency=most) for rate in self.rate]
        return [BenchLoad(concurrency=number) for number in self.concurrency or (8,)]

    def num_requests(self, load: BenchLoad) -> int | None:
        """None: as many as fit in `duration_s`."""
        if self.duration_s:
            return None
        if self.requests:
            return self.requests
        if load.rate:
            return max(LEAST_REQUESTS, round(load.rate * RATE_LASTS_S))
        return max(LEAST_REQUESTS, REQUESTS_PER_STREAM * load.concurrency)

    @property
    def wants_exact_length(self) -> bool:
        return self.ignore_eos == "yes" or (self.ignore_eos == "auto" and self.dataset != "file")

    @property
    def sends_ids(self) -> bool:
        return self.prompt_as == "ids" or (self.prompt_as == "auto" and self.api == "completions")

    @property
    def urls(self) -> list[str]:
        return [self.url, *self.vs]


def turns(config: BenchConfig) -> Iterator[tuple[int, int, list[int]]]:
    """(round, load, servers in their order): each load meets every server before the next load
    begins, and who comes first alternates, so that a machine that grows warm or busy favours none.
    """
    servers = list(range(len(config.urls)))
    turn = 0
    for number in range(config.rounds):
        for load in range(len(config.loads)):
            yield number, load, servers if turn % 2 == 0 else servers[::-1]
            turn += 1
