"""``dask cml`` as sphinx-click can document it, with the options that ``create`` reads from the schema."""

import copy

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx_click.ext import ClickDirective

from dask_cml.cli import cml as _cml
from dask_cml.cli.create import OptionsCommand
from dask_cml.options.table import OPTIONS

#: The options of clusters by their flags.
_KEYS = {f"--{key.replace('.', '-')}": key for key in OPTIONS}


def _documented(command: click.Command) -> click.Command:
    """Return a command whose parameters sphinx-click finds: it does not call ``get_params``."""
    if isinstance(command, click.Group):
        commands = {name: _documented(one) for name, one in command.commands.items()}
        return click.Group(command.name, commands, help=command.help)
    params = [param for param in command.get_params(click.Context(command)) if "--help" not in param.opts]
    has_options = isinstance(command, OptionsCommand)
    params = [_described(param, has_options) for param in params]
    return click.Command(command.name, params=params, help=command.help)


def _described(param: click.Parameter, is_of_cluster: bool) -> click.Parameter:
    """Return a parameter with its default in its help, and a link to the page on options."""
    if not isinstance(param, click.Option):
        return param
    param = copy.copy(param)
    if param.show_default:
        param.show_default, param.help = False, f"{param.help}  [default: {param.default}]"
    if is_of_cluster and param.opts[0] in _KEYS:
        param.help = f"{param.help} See :confval:`cml.{_KEYS[param.opts[0]]}`."
    return param


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
