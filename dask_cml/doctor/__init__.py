"""Run the checks of ``dask cml doctor``: the environment, the platform, and the versions in clusters.

Each check imports the packages that it needs, such as distributed, because any of them may be broken.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dask_cml.cancellation import start_call
from dask_cml.doctor import clusters, environment
from dask_cml.doctor.environment import Finding, dask_command

Check = Callable[[], Finding | list[Finding]]


def examine(names: Sequence[str] = (), timeout: float = 30.0) -> Iterator[Finding]:
    """Run the checks one after the other, and yield their findings.

    If a check raises an error or exceeds the time limit, its finding shows this.

    Parameters
    ----------
    names : sequence of str
        The clusters to check. Default: all clusters of the project.
    timeout : float
        Time limit of each check, in seconds.

    Examples
    --------
    >>> [finding.state for finding in examine() if finding.name == "versions"]
    ['ok']
    """
    # Each check runs in a separate thread, because a call to the platform may hang.
    checks: dict[str, Check] = {
        "platform": environment.platform,
        "network": environment.network,
        "configuration": environment.configuration,
        "state directory": environment.state_directory,
        "scratch": environment.scratch,
        "versions": environment.versions,
        "image": environment.image,
        "dashboard": environment.dashboard,
        "pyarrow": functools.partial(environment.pyarrow, timeout / 2),
        "sidebar": environment.sidebar,
        # Schedulers get a third of the time to respond, and workers get another third.
        "clusters": functools.partial(clusters.versions, names, timeout / 3),
    }
    for name, check in checks.items():
        yield from _run(name, check, timeout)


def _run(name: str, check: Check, timeout: float) -> list[Finding]:
    future = start_call(check)
    concurrent.futures.wait([future], timeout)
    if not future.done():
        again = f"{dask_command()} cml doctor --timeout {3 * timeout:g}"
        return [Finding("wrong", f"The check did not finish within {timeout:g} s.", again, name)]
    if error := future.exception():
        return [Finding("wrong", f"The check failed: {type(error).__name__}: {error}", name=name)]
    result = future.result()
    return result if isinstance(result, list) else [replace(result, name=name)]
