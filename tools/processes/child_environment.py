"""Decides which variables of the environment the processes of a server get.

The command line decides where a server listens, how many processes and threads it has, and what it
answers. Libraries read variables that would change these decisions, often above the options that we
pass to them, so the processes do not get such variables. All others are passed on:
docs/operate/configuration.md lists both kinds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from tools.terminal import Terminal


class LibraryVariables(NamedTuple):
    """Variables of one library that child processes do not get.

    names    patterns of the names, as in a shell
    effect   what the variables would change
    """

    library: str
    names: tuple[str, ...]
    effect: str


LEFT_OUT = (
    LibraryVariables(
        "gunicorn",
        (
            *("GUNICORN_*", "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "SENDFILE"),
            *("LISTEN_FDS", "LISTEN_PID"),
        ),
        "where the server listens, the number and kind of its processes, trust in proxies",
    ),
    LibraryVariables(
        "Flask, Werkzeug", ("FLASK_*", "WERKZEUG_*"), "debug mode, which sends errors to clients"
    ),
    LibraryVariables(
        "gevent",
        ("GEVENT_*", "GEVENTARES_*", "LIBEV_FLAGS", "PURE_PYTHON"),
        "the event loop, name resolution, threads",
    ),
    LibraryVariables(
        "prometheus_client",
        ("PROMETHEUS_*", "prometheus_multiproc_dir"),
        "whether and where processes share their counts",
    ),
    LibraryVariables("pyzmq", ("PYZMQ_*",), "the library that opens sockets"),
    LibraryVariables(
        "OpenMP, BLAS",
        (
            *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_NESTED"),
            *("OMP_MAX_ACTIVE_LEVELS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"),
            *("KMP_AFFINITY", "KMP_HW_SUBSET", "KMP_*THREAD*", "MKL_*NUM_THREADS", "MKL_DYNAMIC"),
            *("OPENBLAS_*THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS"),
            "VECLIB_MAXIMUM_THREADS",
        ),
        "the number of threads (`--threads`) and their cores",
    ),
    LibraryVariables(
        "torch, oneDNN, CUDA",
        (
            *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE"),
            *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET"),
        ),
        "the precision of `--dtype`, and what computes kernels",
    ),
    LibraryVariables(
        "torch",
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",),
        "whether the file of a model may run code",
    ),
    LibraryVariables(
        "Python",
        (
            *("PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONOPTIMIZE", "PYTHONWARNINGS"),
            *("PYTHONHASHSEED", "PYTHONINTMAXSTRDIGITS", "PYTHONBREAKPOINT"),
        ),
        "exit codes, checks, limits against hostile input",
    ),
)


def left_out(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the variables that child processes do not get, sorted."""
    patterns = [pattern for each in LEFT_OUT for pattern in each.names]
    return sorted(name for name in environment if any(fnmatchcase(name, each) for each in patterns))


def child_environment(
    *added: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a child process: `environment` without LEFT_OUT, and `added`, of
    which later ones replace earlier ones."""
    kept = environment.keys() - set(left_out(environment))
    result = {name: environment[name] for name in kept}
    for variables in added:
        result |= variables
    return result


def warn_of_left_out(terminal: Terminal) -> None:
    """Log one line that names the variables that child processes do not get, if there are any."""
    if names := left_out():
        terminal.warn(
            f"ignored variables of the environment: {', '.join(names)}; options decide instead "
            "(docs/operate/configuration.md)"
        )


def table() -> str:
    """Return the rows of LEFT_OUT in Markdown, as docs/operate/configuration.md has them."""
    head = ["| variables | read by | what they could change |", "|---|---|---|"]
    rows = [
        f"| {', '.join(f'`{name}`' for name in each.names)} | {each.library} | {each.effect} |"
        for each in LEFT_OUT
    ]
    return "\n".join([*head, *rows])
