"""All changes of the code and the private parts of other libraries, where they lack a setting or a hook.

Each function is one change. Its docstring says why it is made, in which releases it is needed, and until
when. No other module assigns to what another library defines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.client import Client
from distributed.comm.core import Comm, Connector
from distributed.comm.registry import get_backend
from distributed.core import Status
from distributed.nanny import Nanny, WorkerProcess
from distributed.process import AsyncProcess
from distributed.security import Security
from tornado.routing import Matcher, Rule
from tornado.web import Application, RequestHandler

from dask_cml.cancellation import within

# -- connections


class LimitedConnector(Connector):
    """Connects by another connector, and limits the time of Dask's handshake; see :func:`limit_handshakes`.

    Parameters
    ----------
    connector : Connector
        The other connector.
    why : str, optional
        Why the peer may not answer, as a clause for the error.
    """

    def __init__(self, connector: Connector, why: str | None = None) -> None:
        self._connector, self._why = connector, why

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:
        """Connect by the other connector. The first message that is read is the handshake.

        Raises
        ------
        OSError
            If the other connector does not connect. Reading raises it if the handshake does not come in time.
        """
        comm = await self._connector.connect(address, deserialize=deserialize, **connection_args)
        seconds = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        read = comm.read

        async def read_handshake(*arguments: Any, **more: Any) -> Any:
            vars(comm).pop("read", None)  # a second limit may have removed it
            try:
                return await within(seconds, read(*arguments, **more))
            except asyncio.TimeoutError:
                comm.abort()
                silent = f"{comm.peer_address} accepts connections, but did not answer within {seconds:g} s"
                raise OSError("; ".join(filter(None, (silent, self._why)))) from None

        comm.read = read_handshake
        return comm


@functools.cache  # several Dask workers share a process
def limit_handshakes() -> None:
    """Limit the time of Dask's handshake on each new connection of this process.

    Why: connect (comm/core.py:377) limits the time until a connection is open, with TLS, and then waits for
    the peer's handshake without a limit. If a service mesh accepts the connection, it never comes. A
    backend's connector cannot be chosen.

    Releases: distributed 2024.5 and later.

    Until: distributed applies ``distributed.comm.timeouts.connect`` to the handshake, too.
    """
    for scheme in ("tcp", "tls"):
        backend = get_backend(scheme)
        backend.get_connector = lambda old=backend.get_connector: LimitedConnector(old())  # type: ignore[method-assign, misc]


# -- clients


def find_keys_by_address() -> None:
    """Let clients of this process find a cluster's keys by the scheduler's own address, such as ``tls://…``.

    Why: Dask asks nobody for the keys but ``distributed.client.security-loader``, and has no entry point for
    it.

    Releases: distributed 2024.5 and later.

    Until: distributed looks for loaders among entry points.

    Notes
    -----
    A loader that the user has configured stays. No import calls this, but the first use of a cluster or of an
    address ``cml://…``.
    """
    if dask.config.get("distributed.client.security-loader", None) is None:
        dask.config.set({"distributed.client.security-loader": "dask_cml.address.load_security"})


def give_keys(client: Client, security: Security, connection_args: dict[str, Any]) -> None:
    """Give a client keys after it has connected.

    Why: a client takes keys only when it is created (client.py:1178). By ``cml://<name>`` it is created
    without, and needs them for its connections to workers.

    Releases: distributed 2024.5 and later.

    Until: a comm backend can tell a client which keys its connection has.
    """
    client.security, client.connection_args = security, connection_args
    client.rpc.connection_args = connection_args


def connect_clients_by(ensure_connected: Callable[..., Any]) -> Any:
    """Let clients connect, and connect again, by a function of ours. Return Dask's.

    Why: a client that loses its scheduler waits for the next one only for its own time limit
    (Client._reconnect, client.py:1529), and a cluster that launches another scheduler needs longer.

    Releases: distributed 2024.5 and later.

    Until: distributed has a setting for how long a client tries to connect again.
    """
    dasks = Client._ensure_connected
    Client._ensure_connected = ensure_connected  # type: ignore[method-assign]
    return dasks


def name_time_limit(client: Client, seconds: float) -> None:
    """Let a client's error name the time for which it has waited for another scheduler.

    Why: the error of a client that gives up names its usual time limit, not that of ``connect_clients_by``.

    Releases: distributed 2024.5 and later.

    Until: ``connect_clients_by`` is not needed.
    """
    client._timeout = seconds


def link_dashboards_by(dashboard_link: Callable[[Client], str | None]) -> Any:
    """Let clients show the dashboard's link by a function of ours. Return Dask's.

    Why: Client.dashboard_link (client.py:1316) takes the host from the address, and the port from the
    scheduler's session. For an address without a host, both are wrong.

    Releases: distributed 2024.5 and later.

    Until: a comm backend, or the scheduler, can say the link.
    """
    dasks: Any = vars(Client)["dashboard_link"].fget
    setattr(Client, "dashboard_link", property(dashboard_link, doc=dasks.__doc__))  # noqa: B010
    return dasks


# -- workers and nannies


def terminate_by_kill() -> None:
    """Let nannies of this process kill a worker that they terminate.

    Why: a session's processes ignore SIGTERM, which announces that CML stops the session. By terminate(), a
    nanny ends a worker that uses too much memory (worker_memory.py:423).

    Releases: distributed 2024.5 and later.

    Until: distributed has a setting for the signal.
    """
    AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


def report_exits(nanny: Nanny, report: Callable[[int], None]) -> None:
    """Call a function with the exit status of a nanny's worker process, before the nanny starts another one.

    Why: a nanny tells nobody how its worker's process has ended (Nanny._on_worker_exit_sync, nanny.py:511).

    Releases: distributed 2024.5 and later.

    Until: a NannyPlugin is told of the exit.
    """
    on_exit = nanny._on_worker_exit_sync

    def report_first(status: int) -> None:
        report(status)
        on_exit(status)

    nanny._on_worker_exit_sync = report_first  # type: ignore[method-assign]


@functools.cache
def note_whether_asked() -> None:
    """Note in ``Nanny.process.asked`` whether somebody has asked for the end of a worker's process.

    Why: ``Client.restart`` asks for it, for example. The exit status does not say it, because the nanny kills
    a process that takes long to end, and WorkerProcess.mark_stopped (nanny.py:800) forgets it.

    Releases: distributed 2024.5 and later.

    Until: a NannyPlugin is told of the exit, and who asked for it.
    """
    mark_stopped = WorkerProcess.mark_stopped

    def note_and_mark(process: Any) -> None:
        process.asked = process.status == Status.stopping
        mark_stopped(process)

    WorkerProcess.mark_stopped = note_and_mark  # type: ignore[method-assign]


def configure_worker(nanny: Nanny, changes: Mapping[str, Any]) -> None:
    """Change the configuration that a nanny gives to its worker's process.

    Why: a nanny copies the configuration before it loads the modules of ``--preload-nanny`` (nanny.py:236).

    Releases: distributed 2024.5 and later.

    Until: ``dask cuda worker`` has ``--preload-nanny``, so that no module is in the configuration.
    """
    nanny.config = dask.config.merge(nanny.config, changes)


# -- the scheduler's dashboard


def refuse_requests(application: Application, matcher: Matcher, handler: type[RequestHandler]) -> None:
    """Answer some requests to a scheduler's pages by a handler of ours.

    Why: Dask has no setting for the hosts whose pages may open its WebSockets, and checks no names that
    resolve to 127.0.0.1. By bokeh's own check, ``localhost.evil.example`` is ``localhost`` before bokeh 3.8.2
    (CVE-2026-21883).

    Releases: distributed 2024.5 and later.

    Until: distributed checks the origin of all its WebSockets against a setting.
    """
    application.default_router.rules.insert(0, Rule(matcher, handler))


def remove_pages(application: Any, is_unwanted: Callable[[Any], bool]) -> None:
    """Remove pages of a scheduler's dashboard.

    Why: ``/hardware`` benchmarks the disks of all workers for every reader who opens it
    (dashboard/scheduler.py:71), and no setting leaves a page out.

    Releases: distributed 2024.5 and later.

    Until: distributed has a setting for its pages.

    Parameters
    ----------
    application : RoutingApplication
        The scheduler's web application.
    is_unwanted : callable
        Returns whether a tornado Matcher is of an unwanted page.
    """
    for part in getattr(application, "applications", ()):
        router = part.wildcard_router
        router.rules[:] = [rule for rule in router.rules if not is_unwanted(rule.matcher)]


# -- JupyterLab's sidebar


def sidebar_lists(manager: Any) -> tuple[dict[str, Any], ...] | None:
    """Return the dicts from which the sidebar shows clusters, names and adaptive scaling, to write into them.

    Return None if the manager has other parts.

    Why: dask-labextension lists only clusters that it created, and has no hook to add one.

    Releases: dask-labextension 7.

    Until: dask-labextension lists clusters by dask-ctl's discovery.
    """
    lists: list[Any] = [
        getattr(manager, name, None) for name in ("_clusters", "_cluster_names", "_adaptives")
    ]
    return tuple(lists) if all(isinstance(part, dict) for part in lists) else None


# -- the exit of the interpreter


def exit_before_thread_pools(function: Callable[[], None]) -> None:
    """Call a function when the interpreter exits, before thread pools shut down.

    Why: thread pools shut down before the functions of ``atexit`` run, also the platform's own, so those
    functions could stop no session. Functions registered here run in reverse order, so this one runs before
    the pools'.

    Releases: Python 3.10 and later.

    Until: Python has a public ``threading`` function for it.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]


def leave_pool_thread(thread: threading.Thread) -> None:
    """Let the interpreter exit without waiting for a thread of a ThreadPoolExecutor.

    Why: the interpreter joins all threads of thread pools, also daemons, and a call of the platform may hang
    in the platform's own pool.

    Releases: Python 3.10 and later.

    Until: ThreadPoolExecutor has threads that the interpreter does not wait for.
    """
    executors._threads_queues.pop(thread, None)  # type: ignore[attr-defined]
