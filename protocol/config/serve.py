"""What those processes are told that start and watch others: a whole server, or one engine."""

from __future__ import annotations

from typing import Annotated, Literal

from protocol.config.base import Config, about

KeyFile = Annotated[str, about("the file with the cluster's key; `tidegate key FILE` makes one")]


class Starting(Config, frozen=True, kw_only=True):
    """What the process that starts others does when one of them is slow to come up, or dies."""

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
    start_timeout_s: Annotated[
        float, about("give up when not ready after so long", ge=1, le=86400)
    ] = 600.0
    log_format: Annotated[
        Literal["text", "json"],
        about(
            "format of the log lines of all processes; text: with colours on a terminal, unless "
            "$NO_COLOR is set; json: one object per line, with all that is measured of a request"
        ),
    ] = "text"

    @property
    def max_restarts(self) -> int:
        """0: none"""
        return self.restart_limit if self.restart else 0


class ServeConfig(Starting, frozen=True, kw_only=True):
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
    cluster_key: KeyFile = ""
    kv_address: Annotated[
        str,
        about(
            "with --cluster-key: where other hosts fetch what this engine has computed for them "
            "(tcp://HOST:PORT)"
        ),
    ] = ""

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


class SoloConfig(Starting, frozen=True, kw_only=True):
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
    cluster_key: KeyFile = ""
    drain_s: Annotated[
        float, about("how long open requests may go on after SIGTERM", ge=0, le=86400)
    ] = 30.0

    def __post_init__(self) -> None:
        if not self.cluster_key:
            raise ValueError("cluster_key is missing: `tidegate key FILE` makes one")
