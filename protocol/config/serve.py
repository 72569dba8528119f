"""Configs of the supervisors: `tidegate serve` (a server) and `tidegate engine` (one engine)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, KeyFile, about


class SupervisorConfig(Config, frozen=True, kw_only=True):
    """Options of both supervisors: when to restart a child process, and when to give up."""

    restart: Annotated[
        bool,
        about(
            "restart an engine or a gateway that exits, while the others keep serving; without "
            "this option all stop, with an exit code that shows the cause"
        ),
    ] = False
    restart_limit: Annotated[
        int, about("give up after this many restarts within five minutes", ge=1, le=1000)
    ] = 5
    start_timeout_s: Annotated[
        float, about("give up if the server is not ready after this many seconds", ge=1, le=86400)
    ] = 600.0
    log_format: Annotated[
        Literal["text", "json"],
        about(
            "format of all log lines; text: with colours on a terminal, unless $NO_COLOR is set; "
            "json: one object per line, with all measurements of each request"
        ),
    ] = "text"

    log_file_mib: Annotated[
        int,
        about(
            "largest size of the log in the run directory, which `tidegate logs` shows; 0: none",
            ge=0,
            le=1 << 16,
        ),
    ] = 8

    @property
    def max_restarts(self) -> int:
        """The number of restarts allowed within five minutes; 0 if `restart` is off."""
        return self.restart_limit if self.restart else 0


class ServeConfig(SupervisorConfig, frozen=True, kw_only=True):
    """The command that starts and watches the other processes."""

    render_only: Annotated[
        bool,
        about(
            "start a gateway without an engine, to render, derender and tokenize only; MODEL may "
            "be a directory with just tokenizer.json and tokenizer_config.json"
        ),
    ] = False
    split: Annotated[
        bool,
        about(
            "to try out disaggregation: start a prefill and a decode engine on this machine, with "
            "a temporary cluster key"
        ),
    ] = False
    prefill: Annotated[
        list[str],
        about(
            "address of a running prefill engine (tcp://HOST:PORT, its --address); needs --decode; "
            "repeat for several"
        ),
    ] = []
    decode: Annotated[
        list[str], about("address of a running decode engine; needs --prefill; repeat for several")
    ] = []
    replicas: Annotated[
        int,
        about(
            "start this many engines of the model, on this machine or with --cluster: a request "
            "goes to one that has computed the start of its prompt, unless it is busy, and streams "
            "of a lost engine continue on the others",
            ge=1,
            le=64,
        ),
    ] = 1
    engines: Annotated[
        list[str],
        about(
            "address of a running engine of the model (tcp://HOST:PORT), used as with --replicas; "
            "repeat for several, or separate them by commas"
        ),
    ] = []
    engines_file: Annotated[
        str,
        about(
            "file with addresses of running engines, one per line; read again when it changes, so "
            "engines can be added and removed",
            path="file",
        ),
    ] = ""
    models: Annotated[
        str,
        about(
            "file with several models in place of MODEL: TOML tables [[model]] with path, name, "
            "alias, and options of this command (docs/models/several-models.md)",
            path="file",
        ),
    ] = ""
    load: Annotated[
        Literal["start", "first-use"],
        about(
            "when models are loaded; start: when the server starts, as many as --max-loaded "
            "allows; first-use: each at its first request, which waits"
        ),
    ] = "start"
    max_loaded: Annotated[
        int,
        about(
            "with several models: load at most this many at the same time; 0: as many as fit in "
            "memory; a model that is needed replaces the one that was unused for longest",
            ge=0,
            le=64,
        ),
    ] = 0
    idle_unload_s: Annotated[
        float,
        about(
            "unload a model that was not used for this many seconds; 0: never",
            ge=0,
            le=604800,
        ),
    ] = 0.0
    cluster: Annotated[
        str,
        about(
            "address of a Ray cluster (HOST:PORT, or auto: the one that this machine belongs to): "
            "Ray places the engines of --replicas on its nodes, and they are placed again if a "
            "node is lost"
        ),
    ] = ""
    cpus_per_replica: Annotated[
        int,
        about(
            "CPUs that --cluster reserves for each engine; 0: none if it has a GPU, else an equal "
            "share of the cluster",
            ge=0,
            le=4096,
        ),
    ] = 0
    cluster_env: Annotated[
        list[str],
        about(
            "name of an environment variable that --cluster passes on to the engines, such as "
            "HF_TOKEN; repeat for several",
            metavar="VARIABLE",
        ),
    ] = []
    cluster_key: KeyFile = ""
    kv_address: Annotated[
        str,
        about(
            "address where other hosts fetch K/V computed by this engine (tcp://HOST:PORT); "
            "needs --cluster-key"
        ),
    ] = ""

    @property
    def has_engines_elsewhere(self) -> bool:
        """Whether the replicas are engines that others start."""
        return bool(self.engines or self.engines_file or self.cluster)

    @property
    def loads_on_demand(self) -> bool:
        """Whether models are loaded and unloaded while the server runs, even if there is one."""
        return self.load != "start" or self.idle_unload_s > 0 or bool(self.models)

    def check_on_demand(self) -> None:
        """Raise ValueError if an option cannot be combined with several models, or with a model
        that is loaded on demand."""
        used = [*self._ways, *["cluster_key"] * bool(self.cluster_key)]
        if used:
            raise ValueError(
                f"{used[0]} cannot be combined with several models, load, idle_unload_s or "
                "manage_models"
            )

    @property
    def _ways(self) -> list[str]:
        """The names of the options in use that decide which engines serve, such as `split`."""
        ways = {
            "render_only": self.render_only,
            "split": self.split,
            "decode": bool(self.decode),
            "replicas": self.replicas > 1 and not self.cluster,
            "engines": bool(self.engines or self.engines_file),
            "cluster": bool(self.cluster),
        }
        return [name for name, is_used in ways.items() if is_used]

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode must be set together")
        addresses = [part.strip() for given in self.engines for part in given.split(",")]
        msgspec.structs.force_setattr(self, "engines", [each for each in addresses if each])
        self._make_absolute("engines_file")
        if len(used := self._ways) > 1:
            raise ValueError(f"{used[0]} and {used[1]} cannot be combined")
        if self.split and (self.cluster_key or self.kv_address):
            raise ValueError(
                "split makes its own key and addresses: leave out cluster_key and kv_address"
            )
        if self.cluster and self.kv_address:
            raise ValueError("cluster and kv_address cannot be combined")
        for name in ("cpus_per_replica", "cluster_env"):
            if getattr(self, name) and not self.cluster:
                raise ValueError(f"{name} needs cluster")
        if self.kv_address and not self.cluster_key:
            raise ValueError("kv_address needs cluster_key")


class SoloConfig(SupervisorConfig, frozen=True, kw_only=True):
    """The command that starts and watches one engine of a cluster."""

    address: Annotated[
        str, about("address for gateways: tcp://HOST:PORT, with 0.0.0.0 for all interfaces")
    ] = "tcp://127.0.0.1:5600"
    kv_address: Annotated[
        str,
        about(
            "address where other engines fetch K/V computed by this one: tcp://HOST:PORT, with "
            "a host that they can reach; needed with --role prefill, unused with --role decode"
        ),
    ] = ""
    cluster_key: KeyFile = ""
    drain_s: Annotated[
        float, about("seconds that open requests may continue after SIGTERM", ge=0, le=86400)
    ] = 30.0

    def __post_init__(self) -> None:
        if not self.cluster_key:
            raise ValueError(
                "cluster_key is required: create a key file with `tidegate cluster-key FILE`"
            )
