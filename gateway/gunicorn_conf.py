"""gunicorn's settings, all derived from the GatewayConfig.

    gunicorn -c gateway/gunicorn_conf.py 'gateway.app:create_app()'

Every owner of a socket or a thread is created in the workers, after the fork.
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

from gateway.config import config_from_environment
from protocol.exit_codes import ExitCode
from protocol.lifeline import attach_to_parent, die_with_parent

_parent = attach_to_parent(signal.SIGTERM)

_config = config_from_environment()

bind = (
    f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
)
workers = _config.gateways


class GatewayWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with a hook for new connections and a clean end of open responses.

    gunicorn's own worker closes open responses without a word when it must quit or its master is
    gone. This one sends each client an error first.
    """

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        _service(self).idle_connections.opened(client)
        super().handle(listener, client, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """Refuse transfer codings other than chunked. gunicorn would pass on the coded body."""
        from gateway import unparsed

        unparsed.check_transfer_coding(req.headers)
        return super().handle_request(listener_name, req, sock, addr)

    def load_wsgi(self) -> None:
        """Create the application. An invalid option is reported as the cause of the exit."""
        try:
            super().load_wsgi()
        except AppImportError as error:
            _parent.send_cause(str(error))
            raise

    def handle_error(self, _req: Any, client: Any, _addr: Any, exc: BaseException) -> None:
        """Answer with JSON. gunicorn itself would log the unparsed request and send HTML."""
        from gateway import unparsed

        unparsed.answer(_service(self), client, exc)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """End open answers with an error now, then exit as after SIGTERM."""
        self.alive = False
        if getattr(self, "wsgi", None) is not None:  # not set while it starts
            _service(self).ends_at_once = True

    def notify(self) -> None:
        """Report to the master, once a second; quit if the master is gone."""
        super(GeventWorker, self).notify()
        if self.ppid != os.getppid():
            self.handle_quit(signal.SIGQUIT, None)


class GatewayLogger(GunicornLogger):  # type: ignore[misc]
    """gunicorn's log, in the format of all our processes."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        from gateway.observe import logging

        logging.set_up(_config.log_format, shows_content=_config.log_content)


worker_class = GatewayWorker
logger_class = GatewayLogger
worker_connections = 10_000
backlog = 2048
preload_app = False
# Longer than common clients keep an idle connection (5 s), so that clients close it first.
keepalive = 15
# No proxy header may change a request's path or scheme, because these are checked.
forwarded_allow_ips = ""
forwarder_headers = ""
# The service ends a drain earlier than gunicorn does: clients get a last event, not a reset.
graceful_timeout = math.ceil(_config.drain_s) + 2
timeout = 60
control_socket_disable = True
accesslog = None  # streams bypass gunicorn, so the gateway has its own access log
errorlog = "-"
loglevel = "warning"  # lower levels repeat our own log lines
proc_name = "tidegate-gateway"
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None

_exit_code = mmap.mmap(-1, 1)
"""The master's exit code unless 0, in memory shared with its workers. gunicorn's own code for a
worker that gives up means something else in ExitCode."""

_metrics_directory = ""
if workers > 1:  # before prometheus_client is imported: see gateway/observe/metrics.py
    _metrics_directory = _config.metrics_directory or tempfile.mkdtemp(prefix="tidegate-metrics-")
    shutil.rmtree(_metrics_directory, ignore_errors=True)  # left over from a killed master
    os.mkdir(_metrics_directory, mode=0o700)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = _metrics_directory


def post_fork(_server: Any, _worker: Any) -> None:
    """Called first in the worker. `Worker.notify` checks for the master only once a second, and
    only while the worker serves."""
    die_with_parent(signal.SIGQUIT)


def post_worker_init(worker: Any) -> None:
    """Called in the worker after the application was created."""
    from gateway.http.client_socket import takeover_obstacle

    service = _service(worker)
    service.obstacle = takeover_obstacle(worker)
    service.is_draining = lambda: not worker.alive
    service.give_up = _give_up
    service.start()


def _give_up(why: str, code: ExitCode | None) -> None:
    """End the master without another worker, as for an option that is invalid for any model."""
    import gevent
    from gunicorn.arbiter import Arbiter

    logging.getLogger("gateway").error("the gateway cannot start: %s", why)
    _parent.send_cause(f"the gateway cannot start: {why}")
    _exit_code[0] = code or 0
    gevent.spawn(
        sys.exit, Arbiter.APP_LOAD_ERROR
    )  # in its own greenlet, so that it ends the worker


def pre_request(worker: Any, req: Any) -> None:
    _service(worker).idle_connections.discard(req.unreader.sock)


def post_request(worker: Any, req: Any, environ: Any, _resp: Any) -> None:
    _service(worker).idle_connections.add(environ.get("gunicorn.socket"))


def worker_exit(_server: Any, worker: Any) -> None:
    """Called in the worker at its end. Closing makes the engine abort open requests at once."""
    if getattr(worker, "wsgi", None) is not None:  # it may have failed to start
        _service(worker).close()


def _service(worker: Any) -> Any:
    """Return the worker's `Service`. The master imports only the config and logging of the
    gateway."""
    return worker.wsgi.extensions["tidegate"]


def child_exit(_server: Any, worker: Any) -> None:
    """Called in the master: remove the gauges of a worker that has ended."""
    if _metrics_directory:
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]


def on_exit(_server: Any) -> None:
    if _metrics_directory:
        shutil.rmtree(_metrics_directory, ignore_errors=True)
    if _exit_code[0]:
        sys.exit(_exit_code[0])
