"""``dask cml``: create, list, scale and delete clusters from a shell."""

from dask_cml.cli import change, create, show
from dask_cml.cli.console import cml

__all__ = ["change", "cml", "create", "show"]
