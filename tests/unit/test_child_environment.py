"""Which variables of the environment the processes of a server get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.processes.child_environment import child_environment, left_out, table

DOCS = Path(__file__).parents[2] / "docs" / "operate" / "configuration.md"
IGNORED = """
GUNICORN_CMD_ARGS GUNICORN_FD GUNICORN_PID WEB_CONCURRENCY FORWARDED_ALLOW_IPS SENDFILE LISTEN_FDS
FLASK_DEBUG FLASK_RUN_HOST WERKZEUG_DEBUG_PIN WERKZEUG_RUN_MAIN
GEVENT_LOOP GEVENT_RESOLVER GEVENT_THREADPOOL GEVENTARES_SERVERS LIBEV_FLAGS PURE_PYTHON
PROMETHEUS_MULTIPROC_DIR prometheus_multiproc_dir PROMETHEUS_DISABLE_CREATED_SERIES PYZMQ_BACKEND
OMP_NUM_THREADS OMP_THREAD_LIMIT OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY
KMP_AFFINITY KMP_ALL_THREADS KMP_DEVICE_THREAD_LIMIT MKL_NUM_THREADS MKL_DOMAIN_NUM_THREADS
MKL_DYNAMIC OPENBLAS_NUM_THREADS OPENBLAS_DEFAULT_NUM_THREADS GOTO_NUM_THREADS BLIS_NUM_THREADS
ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE NVIDIA_TF32_OVERRIDE TRITON_INTERPRET
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
PYTHONINSPECT PYTHONSTARTUP PYTHONOPTIMIZE PYTHONWARNINGS PYTHONHASHSEED PYTHONINTMAXSTRDIGITS
"""
KEPT = """
PATH HOME LANG LC_ALL TZ TMPDIR XDG_RUNTIME_DIR XDG_CACHE_HOME NO_COLOR
TIDEGATE_HOME TIDEGATE_GATEWAY TIDEGATE_LIFELINE
HTTP_PROXY HTTPS_PROXY NO_PROXY https_proxy SSL_CERT_FILE REQUESTS_CA_BUNDLE
HF_TOKEN HF_HOME HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY
CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_LAUNCH_BLOCKING NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
PYTORCH_CUDA_ALLOC_CONF TORCH_LOGS TORCH_SHOW_CPP_STACKTRACES TRITON_CACHE_DIR
OMP_WAIT_POLICY GOMP_SPINCOUNT KMP_BLOCKTIME ONEDNN_PRIMITIVE_CACHE_CAPACITY LRU_CACHE_CAPACITY
TOKENIZERS_PARALLELISM RAYON_NUM_THREADS LD_PRELOAD LD_LIBRARY_PATH MALLOC_ARENA_MAX
PYTHONPATH PYTHONHOME PYTHONUTF8 PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONFAULTHANDLER
OTEL_EXPORTER_OTLP_HEADERS RAY_AUTH_MODE NOTIFY_SOCKET
"""


@pytest.mark.parametrize("name", IGNORED.split())
def test_a_variable_that_would_change_what_options_decide_is_left_out(name: str) -> None:
    found = child_environment(environment={name: "1", "HOME": "/home/me"})
    assert found == {"HOME": "/home/me"}
    assert left_out({name: "1", "HOME": "/home/me"}) == [name]


@pytest.mark.parametrize("name", KEPT.split())
def test_a_variable_that_no_option_decides_is_passed_on(name: str) -> None:
    assert child_environment(environment={name: "1"}) == {name: "1"}
    assert left_out({name: "1"}) == []


def test_variables_that_the_server_adds_win_and_are_never_left_out() -> None:
    environment = {"TIDEGATE_GATEWAY": "old", "PROMETHEUS_MULTIPROC_DIR": "/old"}
    added = {"TIDEGATE_GATEWAY": "new"}, {"PROMETHEUS_MULTIPROC_DIR": "/new"}
    found = child_environment(*added, environment=environment)
    assert found == {"TIDEGATE_GATEWAY": "new", "PROMETHEUS_MULTIPROC_DIR": "/new"}


def test_the_documented_variables_are_those_that_are_left_out() -> None:
    _, _, rest = DOCS.read_text().partition("<!-- ignored variables -->\n")
    assert rest.partition("\n<!-- /ignored variables -->")[0] == table()
