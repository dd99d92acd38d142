"""A worker group, as users see it."""

from __future__ import annotations

from dataclasses import dataclass

from dask_cml.options import SessionSize


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group of a cluster.

    Parameters
    ----------
    name : str
        The group's name.
    n_workers : int
        Number of requested worker sessions.
    n_arrived : int
        Number of worker sessions of which a Dask worker is connected.
    size : SessionSize
        Virtual CPUs, memory in GiB, and GPUs of each session.
    nthreads : int
        Number of threads in each session.
    processes : int
        Number of Dask workers in each session.
    resources : dict of str to float
        Resources of each session. Its Dask workers share them evenly.
    """

    name: str
    n_workers: int
    n_arrived: int
    size: SessionSize
    nthreads: int
    processes: int
    resources: dict[str, float]
