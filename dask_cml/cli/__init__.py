"""``dask cml``: create, list, scale and delete clusters from a shell."""

from __future__ import annotations

import signal

import click

from dask_cml.cli import change, create, group, serve, show

# Dask imports this with each of its commands, so functions import slow modules themselves.


@click.group()
def cml() -> None:
    """Dask clusters on Cloudera Machine Learning sessions."""
    # Dask imports dask-ctl, if installed, with each command. It hands signals to an event loop that does not
    # run, so Ctrl-C would do nothing.
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
