"""``dask cml group``: add, delete and list the worker groups of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dask_cml.cli.change import managing, wait_for_scale
from dask_cml.cli.console import (
    as_json,
    cml,
    n_workers,
    of_cluster,
    print_json,
    print_table,
    progress,
    time_limit,
)
from dask_cml.cli.create import OptionsCommand, given


@cml.group()
def group() -> None:
    """Add, delete and list the worker groups of a cluster."""


@group.command(cls=OptionsCommand, grouped=True)
@of_cluster
@click.argument("group")
@time_limit
async def add(name: str, group: str, timeout: float, **options: Any) -> None:
    """Add a worker group to a cluster, and wait until its workers are connected.

    Without an option, the group takes the cluster's value.
    """
    async with managing(name) as manager:
        checked = manager.options.of_group(given(options))
        await manager.wishes.add_group(group, checked)
        await wait_for_scale(manager, checked.n_workers, group, timeout)
    click.echo(f"Worker group {group} added to cluster {name}: {n_workers(checked.n_workers)}")


@group.command()
@of_cluster
@click.argument("group")
async def delete(name: str, group: str) -> None:
    """Delete a worker group: stop all its sessions. Its workers move their results to others first."""
    with progress(lambda: f"Deleting worker group {group}"):
        async with managing(name) as manager:
            await manager.wishes.delete_group(group)
    click.echo(f"Worker group {group} deleted from cluster {name}")


@group.command(name="list")
@of_cluster
@as_json
async def list_groups(name: str, as_json: bool) -> None:
    """List the worker groups of a cluster."""
    async with managing(name) as manager:
        groups = [*manager.state.groups.values()]
    if as_json:
        print_json([asdict(each) for each in groups])
        return
    rows = []
    for each in groups:
        resources = " ".join(f"{key}={amount:g}" for key, amount in each.resources.items())
        size = [f"{each.size.cpu:g}", f"{each.size.memory:g} GiB", str(each.size.nvidia_gpu)]
        rows.append([each.name, f"{each.n_arrived} of {each.n_workers}", *size, resources or "-"])
    print_table(["group", "workers", "cpu", "memory", "gpus", "resources"], rows)
