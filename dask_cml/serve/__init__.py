"""The web UI of ``dask cml serve``: shows and manages all clusters of the project."""

from dask_cml.serve.application import run_application

__all__ = ["run_application"]
