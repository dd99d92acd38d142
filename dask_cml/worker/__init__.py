"""The code that runs in the processes of a worker session: each Dask worker, and their parent process."""
