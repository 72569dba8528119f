"""gunicorn's settings, all derived from the GatewayConfig.

    gunicorn -c gateway/gunicorn_conf.py 'gateway.app:create_app()'

The master process opens no sockets besides the listening one and starts no threads, because a fork
would break them. The workers create theirs after the fork.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from gunicorn.errors import AppImportError
from gunicorn.glogging import Logger as GunicornLogger
from gunicorn.workers.ggevent import GeventWorker

from gateway.gateway_start import FREE, GatewayStart
from gateway.http.connections import NUM_SPARE, connections_within
from gateway.thread_pool import switch_often
from protocol.config.gateway import GatewayConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.imports import without_collections
from protocol.process.lifeline import attach_to_parent, die_with_parent
from protocol.process.malloc import map_large_pieces
from protocol.process.open_files import raise_file_limit
from protocol.process.process_title import set_title
from protocol.process.quick_exit import quick_exit
from protocol.process.start_gate import wait_at_gate

_parent = attach_to_parent(signal.SIGTERM)

_config = GatewayConfig.from_environment()

bind = (
    f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
)
workers = _config.gateways


class GatewayWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with its own handling of drains, shutdown, failed starts and
    malformed requests.

    When a worker receives SIGQUIT or its master has ended, gunicorn closes open responses without
    an error event. This class sends each client an error first.
    """

    def patch(self) -> None:
        """Patch the standard library faster than gunicorn, which then finds it patched."""
        from gateway.gevent_patch import patch_standard_library

        patch_standard_library()
        super().patch()

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve a new connection. While it has no request, it may be closed as idle."""
        with _service(self).connections.opened(client, _peer(addr)):
            super().handle(listener, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """Serve a request. Refuse transfer codings other than chunked, because gunicorn would pass
        the body to the application without decoding it."""
        from gateway import rejected_requests
        from gateway.http.expectation import await_body

        rejected_requests.check_transfer_coding(req.headers)
        await_body(req, sock)
        return super().handle_request(listener_name, req, sock, addr)

    def load_wsgi(self) -> None:
        """Create the application. If that fails, for example because of a bad option, send the
        message to the parent process as the cause of the exit."""
        try:
            with without_collections():
                super().load_wsgi()
        except AppImportError as error:
            _parent.send_cause(str(error))
            raise

    def handle_error(self, _req: Any, client: Any, _addr: Any, exc: BaseException) -> None:
        """Respond to an unparsable request with a JSON error. gunicorn itself would log the request
        and send HTML."""
        from gateway import rejected_requests

        rejected_requests.answer(_service(self), client, exc)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """Handle SIGQUIT: end open answers with an error now, then exit in the same way as after
        SIGTERM."""
        self.alive = False
        if getattr(self, "wsgi", None) is not None:  # it is not set while the worker starts
            _service(self).ends_at_once = True

    def notify(self) -> None:
        """Send the worker's heartbeat to the master once a second. Quit if the master has ended."""
        super(GeventWorker, self).notify()
        if self.ppid != os.getppid():
            self.handle_quit(signal.SIGQUIT, None)


class GatewayLogger(GunicornLogger):  # type: ignore[misc]
    """gunicorn's log, in the format that all Tidegate processes use."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        from gateway.observe import logging

        logging.set_up(_config.log_format, shows_content=_config.log_content)


worker_class = GatewayWorker
logger_class = GatewayLogger
worker_connections = connections_within(raise_file_limit())
backlog = 2048
preload_app = False
# Seconds. Proxies and clients must close an unused connection first, so that no request is sent on
# a connection that is being closed.
keepalive = _config.idle_timeout_s
# No proxy header may change a request's path or scheme, because the gate has checked these.
forwarded_allow_ips = ""
forwarder_headers = ""
# gunicorn would reset the connections that are still open at this time. The service ends a drain
# earlier and sends a last event to each client.
graceful_timeout = math.ceil(_config.drain_s) + 2
timeout = 60
control_socket_disable = True
accesslog = None  # streams bypass gunicorn, so the gateway has its own access log
errorlog = "-"
loglevel = "warning"  # lower levels repeat our own log lines
proc_name = "tidegate-gateway"
# For the heartbeats of the workers; None: Python's temporary directory.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None

_exit_code = mmap.mmap(-1, 1)
"""The master's exit code, in memory that it shares with its workers; 0: gunicorn chooses the code.

gunicorn's own code for a worker that fails to start means something else in ExitCode.
"""

_metrics_directory = ""
if workers > 1:  # must be set before prometheus_client is imported: see gateway/observe/metrics.py
    _metrics_directory = _config.metrics_directory or tempfile.mkdtemp(prefix="tidegate-metrics-")
    shutil.rmtree(_metrics_directory, ignore_errors=True)  # left over from a killed master
    os.mkdir(_metrics_directory, mode=0o700)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = _metrics_directory


def on_starting(server: Any) -> None:
    """Have the server wait for all its workers before it is ready. gunicorn calls this in the
    master, before the first fork."""
    set_title("gateway")
    server.gateway_start = GatewayStart(server.cfg.workers)


def on_reload(server: Any) -> None:
    """Wait for all workers again after SIGHUP, which replaces all of them."""
    on_starting(server)


def pre_fork(server: Any, worker: Any) -> None:
    """Count the new worker among those that must be ready before the server is. gunicorn calls
    this in the master."""
    worker.place = server.gateway_start.take_place()


def post_fork(_server: Any, worker: Any) -> None:
    """Have the kernel signal this worker when the master ends, the memory of large bodies returned
    when they are freed, and threads take turns often. gunicorn calls this after the fork.

    `GatewayWorker.notify` also checks for the master, but only once a second, and only while the
    worker serves.
    """
    set_title(f"gateway {worker.age}")  # the number of workers so far
    die_with_parent(signal.SIGQUIT)
    map_large_pieces()
    switch_often()


def post_worker_init(worker: Any) -> None:
    """Start the service. gunicorn calls this in the worker after it has created the application."""
    from gateway.http.client_socket import takeover_obstacle

    service = _service(worker)
    service.obstacle = takeover_obstacle(worker)
    service.connections.max_open = worker_connections - NUM_SPARE
    service.is_draining = lambda: not worker.alive
    service.give_up = _give_up
    service.place = worker.place
    wait_at_gate(keep_alive=worker.notify)  # gunicorn kills a worker that is silent for `timeout`
    service.start()


def _give_up(why: str, code: ExitCode | None) -> None:
    """End this worker so that the master ends too, instead of starting another worker.

    why   the cause, for the log and for the parent process
    code  exit code of the master; None: gunicorn's own
    """
    import gevent
    from gunicorn.arbiter import Arbiter

    logging.getLogger("gateway").error("the gateway cannot start: %s", why)
    _parent.send_cause(f"the gateway cannot start: {why}")
    _exit_code[0] = code or 0
    # In a greenlet of its own, the exit ends the worker, whatever exceptions the caller catches.
    gevent.spawn(sys.exit, Arbiter.APP_LOAD_ERROR)


def pre_request(worker: Any, req: Any) -> None:
    """Mark the connection as busy. gunicorn calls this before each request."""
    _service(worker).connections.start_request(req.unreader.sock)


def post_request(worker: Any, req: Any, environ: Any, _resp: Any) -> None:
    """Mark the connection as idle. gunicorn calls this after each request."""
    sock = environ.get("gunicorn.socket")
    _service(worker).connections.end_request(sock, environ.get("REMOTE_ADDR", ""))


def _peer(addr: Any) -> str:
    """Return the address of a client without its port; "" if it has none."""
    return str(addr[0]) if isinstance(addr, tuple) else ""


def worker_exit(_server: Any, worker: Any) -> None:
    """Close the service, so that the engine aborts open requests at once, and end the process.
    gunicorn calls this in the worker when it exits."""
    if getattr(worker, "wsgi", None) is not None:  # None if the worker failed to start
        _service(worker).close()
    reason = sys.exception()
    if isinstance(reason, SystemExit) and isinstance(reason.code, int):
        quick_exit(reason.code)


def _service(worker: Any) -> Any:
    """Return the worker's `Service`. Its type is not imported here, because the master loads this
    module, too. The master needs only the gateway's config and log format."""
    return worker.wsgi.extensions["tidegate"]


def child_exit(_server: Any, worker: Any) -> None:
    """Free the place of a worker that has ended, and remove its gauges. gunicorn calls this in the
    master."""
    worker.place.set_state(FREE)
    if _metrics_directory:
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]


def on_exit(_server: Any) -> None:
    """Remove the metrics directory and set the exit code. gunicorn calls this in the master at its
    end."""
    if _metrics_directory:
        shutil.rmtree(_metrics_directory, ignore_errors=True)
    if _exit_code[0]:
        sys.exit(_exit_code[0])
