"""All clusters of a process at once."""

from __future__ import annotations

from dask_cml.cluster import CMLCluster
from dask_cml.errors import CMLError


def close_all() -> None:
    """Close the clusters of this process, and stop their sessions.

    A cluster that was created with ``asynchronous=True`` is closed by its own event loop.

    Raises
    ------
    CMLError
        If the platform did not stop some sessions. The other clusters are closed nevertheless.

    Examples
    --------
    >>> import dask_cml
    >>> dask_cml.close_all()  # doctest: +SKIP
    """
    errors = []
    for cluster in CMLCluster.open():
        try:
            cluster.close()
        except CMLError as error:
            errors.append(error)
    if errors:
        raise CMLError("; ".join(map(str, errors)))
