"""The page of ``dask cml serve``: all clusters of the project, and a manager that stays with them."""
