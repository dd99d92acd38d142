"""``python -m benchmarks.trace_scale``: what of dask-cml runs from ``scale(3)`` until three workers connect.

It counts the modules and functions that a newcomer reads to understand `scale`: those that run in the event
loop of the process that keeps the cluster, on the local platform. The scheduler, the workers, and the threads
that call the platform and write files are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import dask_cml
from benchmarks.local_platform import local_platform
from dask_cml import CMLCluster
from dask_cml.timing import timing

ROOT = Path(dask_cml.__file__).parent
_NEVER = 3600.0
#: At most, by the design of the package.
MOST_MODULES, MOST_FUNCTIONS = 25, 150


class Trace:
    """The functions of dask-cml that this thread calls within a ``with`` block, by their modules."""

    def __init__(self) -> None:
        self.modules: dict[str, set[str]] = defaultdict(set)

    @property
    def n_functions(self) -> int:
        """The number of functions. A function counts with the comprehensions and lambdas in it."""
        return sum(map(len, self.modules.values()))

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT):
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # without it before Python 3.11
        named = name.partition(".<locals>.<")[0]
        if not named.startswith("<"):
            self.modules[str(path.relative_to(ROOT))].add(named)


async def trace_scale(n: int = 3, *, looks: bool = True) -> Trace:
    """Return what runs from ``scale(n)`` until so many workers are connected.

    Parameters
    ----------
    n : int
        Number of workers.
    looks : bool
        Whether the keeper takes its looks meanwhile, as it does anyway.
    """
    light = {"worker_args": ["--no-nanny"], "scheduler_args": ["--no-dashboard"]}
    async with CMLCluster(asynchronous=True, quiet=True, **light) as cluster:
        pause = timing.look
        if not looks:
            timing.look = timing.starting_look = _NEVER
        await asyncio.sleep(2 * pause)  # the looks after the start
        with Trace() as trace:
            cluster.scale(n)
            while len(cluster.scheduler_info["workers"]) < n:  # noqa: ASYNC110, nothing else of ours is to run
                await asyncio.sleep(0.1)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_scale", description=__doc__)
    parser.add_argument("--functions", action="store_true", help="list the functions, too")
    parser.add_argument("--without-looks", action="store_true", help="leave out the keeper's regular looks")
    arguments = parser.parse_args()
    with local_platform():
        trace = asyncio.run(trace_scale(looks=not arguments.without_looks))
    for module, functions in sorted(trace.modules.items()):
        print(f"{module}: {len(functions)}")
        if arguments.functions:
            print("".join(f"    {name}\n" for name in sorted(functions)), end="")
    print(
        f"{len(trace.modules)} modules of at most {MOST_MODULES}, "
        f"{trace.n_functions} functions of at most {MOST_FUNCTIONS}"
    )


if __name__ == "__main__":
    main()
