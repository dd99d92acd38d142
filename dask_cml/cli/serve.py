"""``dask cml serve``."""

from __future__ import annotations

import click

from dask_cml.cli.console import cml


@cml.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port on 127.0.0.1. Default: $CDSW_APP_PORT, then $CDSW_READONLY_PORT, then a free one.",
)
@click.option(
    "--dashboard-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the dashboards on 127.0.0.1, outside of CML. Default: a free one.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser.")
async def serve(port: int | None, dashboard_port: int, open_browser: bool) -> None:
    """Serve a page of all clusters of the project, and keep the clusters created there.

    The command runs until Ctrl-C or SIGTERM, and then stops the clusters that it created. In CML, run it as
    an Application.
    """
    from dask_cml.serve.application import serve as serve_page

    await serve_page(port, _tell, open_browser, dashboard_port)
    click.echo("The page is closed; the clusters created there are stopped.", err=True)


def _tell(link: str, behind_entry: bool) -> None:
    if behind_entry:
        click.echo(f"The page listens at {link}, and CML forwards requests to it.")
    else:
        click.echo(f"Open the page: {link}")
        click.echo("To stop it and the clusters created there, press Ctrl-C.", err=True)
