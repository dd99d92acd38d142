"""Workloads of public notebooks give the same results on CMLCluster and on LocalCluster.

Each workload is written anew after the notebook in its docstring, on data that it creates itself.
A workload imports what it needs itself, because each process of pytest
imports this module, and one runs it.
"""

import operator

import dask
import pytest
from distributed import Client, LocalCluster

from dask_cml import CMLCluster

pytestmark = pytest.mark.slow


def arrays(client, folder):
    """dask-examples, array.ipynb."""
    import dask.array as da

    x = da.arange(1_000_000, chunks=100_000).reshape(1_000, 1_000).rechunk((250, 250)).persist()
    y = x + x.T
    _, singular, _ = da.linalg.svd_compressed(x.astype(float), k=2, seed=1)
    return {"mean": y[::2, 500:].mean(axis=1).compute()[:5], "svd": singular.compute()}


def dataframes(client, folder):
    """dask-tutorial, 01_dataframe.ipynb."""
    import dask.dataframe as dd

    dask.datasets.timeseries("2024-01-01", "2024-01-08", freq="1min", seed=1).to_parquet(folder / "data")
    frame = dd.read_parquet(folder / "data", calculate_divisions=True)
    frame["z"] = frame.x + frame.y
    names = frame[frame.y > 0].groupby("name").agg({"x": "sum", "z": "max"}).compute().sort_index()
    by_name = frame.merge(names.rename(columns={"x": "total"})[["total"]], left_on="name", right_index=True)
    return {
        "groups": names.to_numpy(),
        "rolling": frame.x.rolling(24).mean().std().compute(),
        "shuffled": by_name.set_index("id").total.mean().compute(),
    }


def futures(client, folder):
    """dask-tutorial, 05_futures.ipynb."""
    import numpy as np

    [data] = client.scatter([np.arange(1_000)], broadcast=True)
    parts = client.map(lambda start, array: array[start::10].sum(), range(10), array=data)
    while len(parts) > 1:
        parts = [client.submit(operator.add, *parts[:2]), *parts[2:]]
    failed = client.submit(operator.truediv, 1, 0)
    return {"sum": parts[0].result(), "failed": isinstance(failed.exception(), ZeroDivisionError)}


def grid_search(client, folder):
    """dask-examples, machine-learning/scale-scikit-learn.ipynb."""
    import joblib
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    images, digits = load_digits(n_class=4, return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [0.0003, 0.001]}, cv=2)
    with joblib.parallel_config(backend="dask"):
        search.fit(images, digits)
    return {"scores": search.cv_results_["mean_test_score"], **search.best_params_}


def boosting(client, folder):
    """XGBoost, demo/dask/cpu_training.py."""
    import dask.array as da
    from xgboost import dask as dxgb

    X = da.arange(8_000, chunks=2_000).reshape(2_000, 4).rechunk((500, 4)) % 10
    y = X.sum(axis=1)
    data = dxgb.DaskDMatrix(client, X, y)
    parameters = {"tree_method": "hist", "max_depth": 3}
    output = dxgb.train(client, parameters, data, num_boost_round=4, evals=[(data, "train")])
    predicted = dxgb.predict(client, output["booster"], X).compute()
    return {"predicted": predicted[:10], "error": output["history"]["train"]["rmse"]}


def actors(client, folder):
    """distributed's documentation, actors."""

    class Counter:
        n = 0

        def add(self, amount):
            self.n += amount
            return self.n

    counter = client.submit(Counter, actor=True).result()
    amounts = client.map(lambda amount, counter: counter.add(amount).result(), range(10), counter=counter)
    client.gather(amounts)
    return {"n": counter.n, "next": counter.add(1).result()}


WORKLOADS = [arrays, dataframes, futures, grid_search, boosting, actors]
IMAGES = (dataframes, grid_search)


@pytest.fixture(scope="module")
def local_cluster():
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clusters(local_cluster, shared_platform):  # in this order: the platform takes later processes for its own
    """A cluster of each kind, with connected workers: some libraries do not wait for any."""
    with CMLCluster(n_workers=2, worker_args=["--no-nanny"], platform="local", quiet=True) as cluster:
        for made in (local_cluster, cluster):
            made.wait_for_workers(2, timeout=120)
        yield local_cluster, cluster


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(workload, marks=pytest.mark.images if workload in IMAGES else [])
        for workload in WORKLOADS
    ],
    ids=lambda workload: workload.__name__,
)
def test_a_workload_gives_the_same_results_on_both_clusters(clusters, tmp_path, workload):
    import numpy as np

    results = []
    for cluster in clusters:
        folder = tmp_path / type(cluster).__name__
        folder.mkdir()
        with Client(cluster) as client:
            results.append(workload(client, folder))
    expected, actual = results
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5)
