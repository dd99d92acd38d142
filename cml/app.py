"""Run the web UI of the project's Dask clusters as a CML Application."""

from dask_cml.serve import run_application

run_application()
