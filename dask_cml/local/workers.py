"""The four functions of ``cml.workers_v1``, with processes of this machine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dask_cml import checks
from dask_cml.local import platform, state
from dask_cml.local.state import SessionInfo

T = TypeVar("T")

_THREADS = 10
#: Seconds between two listings of await_workers.
_POLL_INTERVAL = 5.0


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to an HTTP request.

    Parameters
    ----------
    status_code : int
        The HTTP status.

    Examples
    --------
    >>> Response(404).ok
    False
    """

    status_code: int

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status_code < 400


def launch_workers(
    n: int,
    cpu: float,
    memory: float,
    nvidia_gpu: int = 0,
    kernel: str = "python3",
    script: str = "",
    code: str = "",
    env: Mapping[str, str] = {},
    name: str | None = None,
    accelerator_label_id: int | None = None,
    resource_profile_id: int | None = None,
    resource_group_id: int | None = None,
    rdma_network_selections: Sequence[Mapping[str, int]] = (),
) -> list[SessionInfo]:
    """Launch n sessions, each a process of this machine.

    The n requests run in a pool of 10 threads. This function fails while the interpreter exits, because
    ``concurrent.futures`` refuses to start threads even before the functions of :mod:`atexit` run.

    Parameters
    ----------
    n : int
        Number of sessions.
    cpu : float
        Virtual CPUs per session. They count against the quota, but are not enforced.
    memory : float
        Memory per session, in GiB. It counts against the quota, but is not enforced.
    nvidia_gpu : int
        Number of GPUs per session. They count against the quota, but are not enforced.
    kernel : str
        Name of the kernel. Only recorded.
    script : str
        Path of a Python file to run. The working directory is that of the launcher.
    code : str
        Code to run if there is no script. IPython runs code that begins with ``!``, and its exit status is
        lost. An exception in other code makes the session end as ``failed``.
    env : mapping of str to str
        Additional environment variables. A session does not inherit the launcher's.
    name : str, optional
        Name of the sessions, for display.
    accelerator_label_id : int, optional
        Ignored.
    resource_profile_id : int, optional
        Ignored.
    resource_group_id : int, optional
        Ignored.
    rdma_network_selections : sequence of mapping
        Ignored.

    Returns
    -------
    list of dict
        One for each session, in arbitrary order. A refused session has no ``id``, but ``message``,
        ``k8sMessage`` and ``engineId``.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    ImportError
        If the code requires IPython, and IPython is not installed.

    Examples
    --------
    >>> from dask_cml import local
    >>> [session] = local.launch_workers(1, cpu=1, memory=2, code="print('hello')")
    >>> session["id"] in [listed["id"] for listed in local.list_workers()]
    True
    >>> answers = local.stop_workers(session["id"])
    """
    if not script and not code:
        raise ValueError("invalid script='', code='': expected a script or code")
    request: dict[str, Any] = {
        "cpu": checks.positive("cpu", cpu),
        "memory": checks.positive("memory", memory),
        "nvidia_gpu": checks.integer("nvidia_gpu", nvidia_gpu, 0),
        "sessions": 1,
        "kernel": kernel,
        "script": script,
        "code": "" if script else code,
        "env": checks.environment("env", env),
        "name": name or "",
    }

    launch = platform.current().launch
    return _in_threads(lambda _: launch(request), range(checks.integer("n", n, 0)))


def list_workers() -> list[SessionInfo]:
    """Return all sessions that the calling session launched, including ended ones, by one request.

    Returns
    -------
    list of dict
        The oldest first.

    Examples
    --------
    >>> from dask_cml import local
    >>> sessions = {session["id"]: session["status"] for session in local.list_workers()}
    """
    return platform.current().own_sessions()


def await_workers(
    ids: Iterable[str | Mapping[str, Any]],
    wait_for_completion: bool = True,
    timeout_seconds: float = 60,
) -> dict[str, list[SessionInfo]]:
    """Wait until all sessions have ended or, with ``wait_for_completion=False``, run.

    Lists the sessions now and every 5 s, and blocks meanwhile.

    Parameters
    ----------
    ids : iterable of str or dict
        Ids of sessions, or the dicts from :func:`launch_workers`.
    wait_for_completion : bool
        Whether to wait until the sessions have ended.
    timeout_seconds : float
        Time limit, in seconds. With 0, all sessions count as failures, as on CML.

    Returns
    -------
    dict
        ``"workers"`` are the sessions that have succeeded, or run. ``"failures"`` are the others.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.await_workers([], timeout_seconds=1)
    {'workers': [], 'failures': []}
    """
    wanted = {*_ids_of(ids)}
    goal = "succeeded" if wait_for_completion else "running"
    waited = 0.0
    while True:
        found = [session for session in list_workers() if session["id"] in wanted]
        good = [session for session in found if timeout_seconds and session["status"] == goal]
        settled = {session["id"] for session in found if session["status"] in state.ENDED}
        settled.update(session["id"] for session in good)
        if settled == wanted or timeout_seconds <= waited:
            return {"workers": good, "failures": [session for session in found if session not in good]}
        time.sleep(_POLL_INTERVAL)
        waited += _POLL_INTERVAL


def stop_workers(*ids: str | Mapping[str, Any]) -> list[Response] | None:
    """Ask sessions to stop, by one request for each from a pool of threads.

    Like :func:`launch_workers`, this function fails while the interpreter exits.

    Parameters
    ----------
    *ids : str or dict
        Ids of sessions of any launcher, or dicts from the other functions. **Without ids, all sessions of
        the calling session are stopped**, as on CML.

    Returns
    -------
    list of Response or None
        One for each id, in arbitrary order: 204, or 404 for an unknown id. None if there was nothing to stop.
        The status becomes ``stopped`` after the processes have ended.

    Examples
    --------
    >>> from dask_cml import local
    >>> code = "import time; time.sleep(600)"
    >>> [session] = local.launch_workers(1, cpu=1, memory=2, code=code)
    >>> local.stop_workers(session["id"])[0].status_code
    204
    """
    if not ids:
        mine = [session["id"] for session in list_workers()]
        return stop_workers(*mine) if mine else None

    stop = platform.current().stop
    return _in_threads(lambda session_id: Response(stop(session_id)), _ids_of(ids))


def shares_host_network() -> bool:
    """Return whether sessions share this machine's loopback and ports.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.shares_host_network()
    True
    """
    return platform.current().shares_host_network


def _ids_of(sessions: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """Return the ids of sessions that are given by their ids or as dicts."""
    return [session if isinstance(session, str) else session["id"] for session in sessions]


def _in_threads(function: Callable[[Any], T], arguments: Iterable[Any]) -> list[T]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(function, argument) for argument in arguments]
    # In arbitrary order, as on CML, so that no caller relies on one.
    return [future.result() for future in set(futures)]
