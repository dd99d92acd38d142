"""The page of ``dask cml serve``: it shows and manages all clusters of the project."""
