"""Workloads of public notebooks give the same results on CMLCluster and on LocalCluster.

Each workload is written anew after the notebook in its docstring, on data that it creates itself.
A workload imports what it needs itself, because each process of pytest
imports this module, and one runs it.
"""

from __future__ import annotations

import json
import operator

import dask
import pytest
from distributed import Client, LocalCluster, as_completed, get_client, rejoin, secede

from dask_cml import CMLCluster


def arrays(client, folder):
    """dask-examples, array.ipynb."""
    import dask.array as da

    x = da.arange(1_000_000, chunks=100_000).reshape(1_000, 1_000).rechunk((250, 250)).persist()
    y = x + x.T
    _, singular, _ = da.linalg.svd_compressed(x.astype(float), k=2, seed=1)
    return {"mean": y[::2, 500:].mean(axis=1).compute()[:5], "svd": singular.compute()}


def bags(client, folder):
    """dask-examples, bag.ipynb."""
    import dask.bag as db

    people = [{"age": n % 90, "name": [f"N{n}", "Smith"], "job": f"J{n**2 % 7}"} for n in range(2_000)]
    db.from_sequence(people, npartitions=4).map(json.dumps).to_textfiles(str(folder / "*.json"))
    records = db.read_text(str(folder / "*.json")).map(json.loads)
    jobs = records.filter(lambda person: person["age"] > 30).pluck("job").frequencies().compute()
    flat = records.map(lambda person: {"age": person["age"], "job": person["job"]}).to_dataframe()
    return {**dict(jobs), "mean": flat.groupby("job").age.mean().compute().sort_index().to_numpy()}


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


def delayed(client, folder):
    """dask-tutorial, 03_dask.delayed.ipynb."""
    import numpy as np
    import pandas as pd

    for month in range(1, 5):
        flights = pd.DataFrame({"origin": ["EWR", "JFK", "LGA"] * 50, "delay": np.arange(150) * month})
        flights.to_csv(folder / f"{month}.csv", index=False)
    read = dask.delayed(pd.read_csv)
    groups = [read(path).groupby("origin").delay for path in sorted(folder.glob("*.csv"))]
    sums, counts = dask.compute([group.sum() for group in groups], [group.count() for group in groups])
    return {"mean": (sum(sums) / sum(counts)).sort_index().to_numpy()}


def futures(client, folder):
    """dask-tutorial, 05_futures.ipynb."""
    import numpy as np

    [data] = client.scatter([np.arange(1_000)], broadcast=True)
    parts = client.map(lambda start, array: array[start::10].sum(), range(10), array=data)
    while len(parts) > 1:
        parts = [client.submit(operator.add, *parts[:2]), *parts[2:]]
    failed = client.submit(operator.truediv, 1, 0)
    return {"sum": parts[0].result(), "failed": isinstance(failed.exception(), ZeroDivisionError)}


def evolving(client, folder):
    """dask-examples, applications/evolving-workflows.ipynb."""
    lists = client.map(lambda n: list(range(n)), range(1, 8))
    lengths = dict(zip(client.map(len, lists), lists, strict=True))
    arriving = as_completed(lengths)
    total = 0
    for future in arriving:
        if future in lengths:
            items = [
                client.submit(operator.getitem, lengths[future], i, priority=1)
                for i in range(future.result())
            ]
            arriving.update(client.map(lambda item: item + 1, items, pure=False))
        else:
            total += future.result()

    def submit(n):
        tasks = get_client().map(operator.neg, range(n))
        secede()
        results = get_client().gather(tasks)
        rejoin()
        return sum(results)

    return {"total": total, "from tasks": client.gather(client.map(submit, range(1, 8)))}


def simulations(client, folder):
    """dask-examples, applications/embarrassingly-parallel.ipynb."""
    import dask.bag as db
    import numpy as np
    import pandas as pd

    parameters = pd.DataFrame(np.random.default_rng(1).random((40, 4)), columns=[*"abcd"])

    def simulate(row):
        return float(np.random.default_rng(int(1e6 * row[0])).normal(row[1], row[2], 1_000).mean() + row[3])

    lazy = dask.persist(*[dask.delayed(simulate)(row) for row in parameters.to_numpy()])
    as_bag = db.from_sequence(parameters.to_numpy().tolist(), npartitions=8).map(simulate).compute()
    return {"delayed": list(dask.compute(*lazy)), "bag": as_bag}


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


def incremental(client, folder):
    """dask-examples, machine-learning/incremental.ipynb."""
    import dask.array as da
    from sklearn.datasets import make_classification
    from sklearn.linear_model import SGDClassifier

    samples, labels = make_classification(2_000, 20, random_state=1)
    X, y = da.from_array(samples, chunks=(500, 20)), da.from_array(labels, chunks=500)
    model = dask.delayed(SGDClassifier(random_state=1))
    for block, wanted in zip(X.to_delayed().ravel(), y.to_delayed(), strict=True):
        model = model.partial_fit(block, wanted, classes=[0, 1])
    return {"coefficients": model.coef_.compute()}


def text(client, folder):
    """dask-examples, machine-learning/text-vectorization.ipynb."""
    import dask.bag as db
    from sklearn.feature_extraction.text import HashingVectorizer

    words = ["graphics", "windows", "hockey", "motorcycles"]
    posts = db.from_sequence([" ".join(words[: n % 4 + 1]) for n in range(400)], npartitions=4)
    vectors = [dask.delayed(HashingVectorizer(n_features=64).transform)(part) for part in posts.to_delayed()]
    return {"nonzero": [vector.nnz for vector in dask.compute(*vectors)]}


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


def graphs(client, folder):
    """Dask's documentation, custom graphs."""
    graph = {f"load-{n}": (range, n) for n in range(1, 5)}
    graph |= {f"clean-{n}": (sum, f"load-{n}") for n in range(1, 5)}
    graph["store"] = (sorted, [f"clean-{n}" for n in range(1, 5)])
    return {"store": client.get(graph, "store")}


WORKLOADS = [
    arrays, bags, dataframes, delayed, futures, evolving, simulations, grid_search, incremental, text,
    boosting, actors, graphs,
]  # fmt: skip
SLOW = (bags, dataframes, grid_search, incremental)


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
        pytest.param(workload, marks=[pytest.mark.slow, pytest.mark.images] if workload in SLOW else [])
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
