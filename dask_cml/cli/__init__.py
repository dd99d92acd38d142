"""``dask cml``: make, find, steer and end clusters from a shell."""

from __future__ import annotations

import signal

import click

from dask_cml.cli import change, create, group, serve, show

# Dask imports this with every one of its commands, so what takes long to import is imported where it is used.


@click.group()
def cml() -> None:
    """Dask clusters on Cloudera Machine Learning sessions."""
    # dask-ctl, where it is installed, is imported with every command of Dask's, and has signals handled by an
    # event loop that does not run: Ctrl-C would be without effect.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if getattr(signal.getsignal(number), "__module__", None) == "distributed.cli.utils":
            signal.signal(number, default)


for _command in (
    create.create,
    show.list_clusters,
    show.info,
    change.scale,
    change.adapt,
    group.group,
    show.logs,
    serve.serve,
    change.delete,
    change.prune,
    show.doctor,
):
    cml.add_command(_command)
