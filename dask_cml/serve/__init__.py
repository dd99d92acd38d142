"""The page of ``dask cml serve``: shows and manages all clusters of the project."""
