"""Cases of a benchmark, each of which runs in a process of its own, some at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

#: A workload, the seconds that sessions take to start, and a policy.
Case = tuple[str, float, str]


def measure(module: str, *arguments: object) -> dict[str, Any]:
    """Run a module's program in a process of its own, and return the JSON that it prints last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def run_cases(
    module: str,
    workloads: Iterable[str],
    start_delays: Sequence[float],
    policies: Sequence[str],
    *,
    repeats: int,
    at_once: int,
) -> dict[Case, list[dict[str, Any]]]:
    """Run a module's program with every case as its arguments, the last workload first.

    Parameters
    ----------
    module : str
        The module, whose program prints a result as JSON.
    workloads, start_delays, policies
        What the cases are made of.
    repeats : int
        How often each case runs.
    at_once : int
        How many run at the same time.

    Returns
    -------
    dict
        The results of each case.
    """
    cases: list[Case] = [*product([*workloads][::-1], start_delays, policies)]
    results: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    with ThreadPoolExecutor(at_once) as threads:
        measured = threads.map(lambda case: measure(module, *case), cases * repeats)
        for case, result in zip(cases * repeats, measured, strict=True):
            results[case].append(result)
    return results
