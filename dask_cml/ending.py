"""The end of clusters with the interpreter."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from distributed.core import Status

from dask_cml.errors import CMLError

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)

_TIMEOUT = 30.0
_clusters: set[CMLCluster] = set()


def end_at_exit(cluster: CMLCluster) -> None:
    """End this cluster with the interpreter, if it is not closed before."""
    _clusters.add(cluster)


def no_longer_end_at_exit(cluster: CMLCluster) -> None:
    """Forget a cluster that is closed."""
    _clusters.discard(cluster)


def _end_all() -> None:
    for cluster in [*_clusters]:
        try:
            if not cluster.asynchronous:
                cluster.close(timeout=_TIMEOUT)
        except Exception as error:
            logger.info("The cluster %s is ended by plain calls, after %r", cluster.name, error)
        try:
            # The loop may be gone, as after asyncio.run; then this is all that can be done, and enough.
            if cluster.options.shutdown_on_close:
                cluster.api.end()
        except CMLError as error:
            logger.error("%s", error)
        cluster.status = Status.closed


# Thread pools are shut down before atexit functions run, the platform's own as well as ours: nothing
# could be stopped from there. These functions run before that.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
