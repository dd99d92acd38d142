"""Compare package versions in running clusters with those in this process."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask_cml.doctor.environment import Finding, dask_command
from dask_cml.errors import NoSuchCluster

if TYPE_CHECKING:
    from dask_cml.records.store import Record

Versions = Mapping[str, str | None]


def versions(names: Sequence[str], timeout: float) -> list[Finding]:
    """Compare the versions in clusters with those in this process.

    Parameters
    ----------
    names : sequence of str
        The names of the clusters. Default: all clusters of the project.
    timeout : float
        Time limit for the schedulers to respond, in seconds. Workers get the same time again.
    """
    from dask_cml.records import store

    findings = []
    records = [] if names else store.records()
    for name in dict.fromkeys(names):
        try:
            records.append(store.read(name))
        except (NoSuchCluster, store.RecordUnreadable) as error:
            findings.append(Finding("wrong", f"{error}.", f"{dask_command()} cml list", f"cluster {name}"))
    findings += asyncio.run(_compare_all(records, timeout))
    return findings or [Finding("ok", "The project has no clusters.", name="clusters")]


async def _compare_all(records: Sequence[Record], timeout: float) -> list[Finding]:
    from dask_cml.records import operations

    rows = await operations.describe(records)
    comparisons = [_compare(record, row, timeout) for record, row in zip(records, rows, strict=True)]
    findings = await asyncio.gather(*comparisons)
    named = zip(records, findings, strict=True)
    return [replace(finding, name=f"cluster {record.name}") for record, finding in named]


async def _compare(record: Record, row: Mapping[str, Any], timeout: float) -> Finding:
    from distributed.versions import get_versions

    name = shlex.quote(record.name)
    if row["status"] == "starting":
        return Finding("ok", "The cluster is starting.")
    if row["workers"] is None:
        words = f"The cluster is {row['status']}: its scheduler does not respond."
        command = "prune" if row["status"] == "stale" else f"info {name}"
        return Finding("warning", words, f"{dask_command()} cml {command}")
    if record.security is None:
        words = "The cluster has no keys, so the doctor does not connect to it: another program may answer."
        return Finding("ok", words)
    try:
        found = await asyncio.wait_for(_ask(record, timeout), timeout)
    except (OSError, ValueError, RuntimeError, asyncio.TimeoutError) as error:
        words = f"The cluster did not report all versions within {timeout:.0f} s: {error!r}."
        command = f"{dask_command()} cml doctor --timeout {9 * timeout:g} {name}"
        return Finding("warning", words, command)
    if differences := compare(get_versions()["packages"], found):
        words = f"{' '.join(differences)} Delete the cluster, and create it again."
        return Finding("warning", words, f"{dask_command()} cml delete {name}")
    if (silent := row["workers"] + 1 - len(found)) > 0:  # some may have connected meanwhile
        return Finding("warning", f"{silent} of {row['workers']} workers do not respond.")
    return Finding("ok", f"Every process of the cluster ({len(found)}) runs this process's versions.")


async def _ask(record: Record, timeout: float) -> list[Versions]:
    """Return the versions in the scheduler, and in each worker that responds."""
    own = await record.ask_scheduler("versions", timeout)
    workers = await record.ask_scheduler("broadcast", timeout, msg={"op": "versions"}, on_error="ignore")
    return [answer["packages"] for answer in (own, *workers.values())]


def compare(here: Versions, there: Sequence[Versions]) -> list[str]:
    """Return a sentence for each package that has different versions in a cluster and in this process.

    Parameters
    ----------
    here : mapping of str to str
        Versions in this process by the package's name, from `distributed.versions.get_versions`.
    there : sequence of mapping
        Versions in the scheduler and in each worker.

    Examples
    --------
    >>> compare({"dask": "2026.8.0"}, [{"dask": "2024.5.0"}, {"dask": "2024.5.0"}])
    ['dask is 2026.8.0 here, and 2024.5.0 in 2 processes of the cluster.']
    >>> compare({"toolz": "1.2.0", "lz4": None}, [{"toolz": "0.12.1", "lz4": None}])
    ['toolz is 1.2.0 here, and 0.12.1 in 1 process of the cluster.']
    """
    sentences = []
    for package, own in here.items():
        found = Counter(versions.get(package) for versions in there)
        if {*found} != {own}:
            counted = ", ".join(f"{version} in {n} process{'es' * (n != 1)}" for version, n in found.items())
            sentences.append(f"{package} is {own} here, and {counted} of the cluster.")
    return sentences
