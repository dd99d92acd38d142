"""Measurements of dask-cml, run by ``python -m benchmarks``; docs/benchmarks.md tells what they are."""
