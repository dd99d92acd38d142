from __future__ import annotations

import importlib
import sys

import pytest
from distributed import Client
from ports import free_port

from dask_cml import local
from dask_cml.local import workers

_NAMES = ("cml", "cml.workers_v1", "cdsw")


@pytest.fixture
def no_cml():
    """What other tests have imported as cml is unknown here. What this test imports is forgotten after it."""
    # Not another sys.modules: the import statement would still find modules in the first one.
    before = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    yield
    for name in _NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(params=["cml/workers_v1.py", "cdsw.py"])
def real(no_cml, monkeypatch, tmp_path, request):
    """The name of a real module that can be imported."""
    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    return request.param.removesuffix(".py").replace("/", ".")


def test_installed_platform_is_imported_as_cml_and_as_cdsw(platform, no_cml, monkeypatch, tmp_path):
    (tmp_path / "cml").mkdir()  # a folder without modules is no real one
    monkeypatch.syspath_prepend(tmp_path)
    platform.install()
    platform.install()
    assert importlib.import_module("cml.workers_v1") is local
    assert importlib.import_module("cdsw") is local
    namespace: dict = {}
    exec("from cml import workers_v1", namespace)
    assert namespace["workers_v1"] is local


def test_a_real_module_is_not_hidden_unless_forced(platform, real):
    with pytest.raises(RuntimeError, match=f"{real.split('.')[0]} is installed.*force"):
        platform.install()
    assert importlib.import_module(real) is not local
    platform.install(force=True)
    assert importlib.import_module(real) is local


class HandmadeCluster:
    """A cluster as helpers before dask-cml made it: by the older module, with no more than it offers."""

    def __init__(self, workers: int, port: int) -> None:
        self.api = importlib.import_module("cdsw")
        self.workers, self.port = workers, port

    def init(self) -> None:
        where = f"--host 0.0.0.0 --port {self.port} --dashboard-address 127.0.0.1:0"
        [scheduler] = self.start(1, f"!dask scheduler {where}")
        self.url = f"tcp://{scheduler['ip_address']}:{self.port}"
        self.start(self.workers, f"!dask worker {self.url}")

    def start(self, n: int, code: str) -> list[dict]:
        launched = self.api.launch_workers(n=n, cpu=1, memory=1, nvidia_gpu=0, code=code)
        return self.api.await_workers(launched, wait_for_completion=False, timeout_seconds=300)["workers"]

    def terminate(self) -> None:
        self.api.stop_workers()


@pytest.mark.slow
def test_a_cluster_that_is_written_for_cdsw_runs_unchanged(platform, no_cml, monkeypatch, until):
    monkeypatch.setattr(workers, "_POLL_INTERVAL", 0.1)
    platform.install()
    cluster = HandmadeCluster(2, free_port())
    cluster.init()
    with Client(cluster.url, timeout=120) as client:
        client.wait_for_workers(2, timeout=120)
        assert client.submit(sum, [1, 2]).result(timeout=120) == 3
    cluster.terminate()
    until(lambda: {session["status"] for session in platform.sessions()} == {"stopped"})
