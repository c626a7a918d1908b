"""`elastic-harness dashboard`: a page that shows runs while they go on. It runs beside them, reads their folders and
takes nothing of their time."""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from elastic_harness.contract import variables
from elastic_harness.dashboard.access import Access
from elastic_harness.dashboard.hub import Catalogue, Hub
from elastic_harness.dashboard.server import DashboardServer
from elastic_harness.errors import EXIT_SUCCESS, ConfigError, InfrastructureError
from elastic_harness.metrics import CONTENT_TYPE, RunMetrics, text
from elastic_harness.runs.folder import locked

PORT = 8770
PORTS_TRIED = 20
NICENESS = 5  # training goes first
TOKEN_CHARS_MIN = 16

EPILOG = f"""\
examples
  elastic-harness dashboard                     all runs below runs/
  elastic-harness dashboard runs/first          one run
  ssh -L {PORT}:127.0.0.1:{PORT} HOST             then open http://127.0.0.1:{PORT}/ on your own machine

Others on this machine can open the page as well; --token keeps them out. With --control, or with another --host, a
token is always asked for. ${variables.DASHBOARD_TOKEN} sets it; otherwise each start makes a new one.
"""


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="elastic-harness dashboard",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="?", metavar="RUN|RUNS_FOLDER", help="default: runs")
    parser.add_argument("--port", type=int, help=f"0: any (default: {PORT}, or the next that is free)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--token", action="store_true", help="ask for a token on this machine, too")
    parser.add_argument("--control", action="store_true", help="kill, add, drain and stop from the page")
    given = parser.parse_args(list(argv))
    if given.port is not None and not 0 <= given.port < 1 << 16:
        raise ConfigError(f"--port is {given.port}; it must lie between 0 and {(1 << 16) - 1}")
    catalogue = Catalogue(given.what)
    loopback = is_loopback(given.host)
    token = _token() if given.token or given.control or not loopback else None
    names = frozenset(name.lower() for name in (given.host, socket.gethostname()) if not loopback)
    access = Access(loopback, names, token, given.control)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    server = _server(given.host, given.port, access, Hub(catalogue))
    server.mounted["/metrics"] = partial(metrics_of, catalogue, {})
    _serve(server, lambda: _announce(server, given.host, catalogue.what))
    return EXIT_SUCCESS


def metrics_of(catalogue: Catalogue, readers: dict[Path, RunMetrics]) -> tuple[str, bytes]:
    """Return the metrics of the live runs, or of the one run that is shown, for Prometheus. `readers` keeps what was
    read of each."""
    shown = catalogue.paths()
    paths = [path for of_run in shown.values() for path in of_run if len(shown) == 1 or locked(path)]
    for path in readers.keys() - set(paths):
        del readers[path]
    return CONTENT_TYPE, text([readers.setdefault(path, RunMetrics(path)) for path in paths]).encode()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token() -> str:
    given = os.environ.get(variables.DASHBOARD_TOKEN)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < TOKEN_CHARS_MIN or not all(c.isascii() and (c.isalnum() or c in "-_") for c in given):
        raise ConfigError(
            f"{variables.DASHBOARD_TOKEN} must have at least {TOKEN_CHARS_MIN} letters, digits, '-' or '_'; unset it, "
            "and a token is made"
        )
    return given


def _server(host: str, port: int | None, access: Access, hub: Hub) -> DashboardServer:
    """Return the server, listening: at the port that was asked for, or at the first that is free."""
    for number in range(PORT, PORT + PORTS_TRIED) if port is None else [port]:
        try:
            return DashboardServer(host, number, access, hub)
        except InfrastructureError as error:
            last, cause = error, error.__cause__
            if port is not None or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
    raise last


def _announce(server: DashboardServer, host: str, what: str) -> None:
    """Print where the page is."""
    shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{server.port}/"
    token = "" if server.access.token is None else f"?token={server.access.token}"
    print(f"[dashboard] {what}: {address}{token}", flush=True)
    if server.access.loopback and "SSH_CONNECTION" in os.environ:
        port = server.port
        print(f"[dashboard] from your machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
    if server.access.control:
        print("[dashboard] whoever has this address can kill workers and stop runs", file=sys.stderr, flush=True)


def _serve(server: DashboardServer, announce: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM."""

    def end(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for the loop that this signal is in

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        announce()
        server.serve_forever(poll_interval=0.1)
    finally:
        server.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
