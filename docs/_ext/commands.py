"""``dask cml`` as sphinx-click can document it, with the options that ``create`` reads from the schema."""

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx_click.ext import ClickDirective

from dask_cml.cli import cml as _cml


def _documented(command: click.Command) -> click.Command:
    """Return a command whose parameters sphinx-click finds: it does not call ``get_params``."""
    if isinstance(command, click.Group):
        commands = {name: _documented(one) for name, one in command.commands.items()}
        return click.Group(command.name, commands, help=command.help)
    params = [param for param in command.get_params(click.Context(command)) if "--help" not in param.opts]
    return click.Command(command.name, params=params, help=command.help)


class Commands(ClickDirective):
    """The reference of commands, with the straight quotes that shells need."""

    def run(self) -> list[nodes.Node]:
        sections = list(super().run())
        for section in sections:
            section["support_smartquotes"] = False
        return sections


cml = _documented(_cml)


def _no_arguments(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Leave out the list of arguments, which only repeats the usage."""
    lines.clear()


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx_click")
    app.add_directive("click", Commands, override=True)
    app.connect("sphinx-click-process-arguments", _no_arguments)
    return {"parallel_read_safe": True}
