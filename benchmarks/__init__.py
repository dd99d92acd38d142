"""Measurements of dask-cml, run by ``python -m benchmarks``; README.md tells what they are."""
