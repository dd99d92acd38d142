"""dask-ctl manages clusters. Collected where dask-ctl is installed."""

import os
import subprocess
import sys

import pytest
from clusters import live
from shells import run_json

pytestmark = pytest.mark.usefixtures("locally")
SPEC = """
version: 1
module: dask_cml
class: CMLCluster
kwargs:
  name: mine
  n-workers: 1
"""


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    return str(file)


def run(*command):
    """Run a program of its own: dask-ctl has an event loop and signal handlers from its import on."""
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def ctl(*arguments):
    return run("-m", "dask", "cluster", *arguments)


def test_dask_cluster_manages_a_cluster_from_its_creation_to_its_end(platform, spec):
    assert ctl("create", "-f", spec) == "Created cluster mine.\n"
    assert len(run_json("info", "mine")["sessions"]) == 2
    assert "cmlcluster" in ctl("discovery", "list")
    assert "Scaled cluster mine to 2 workers." in ctl("scale", "mine", "2")
    [line] = [line.split() for line in ctl("list", "cmlcluster").splitlines() if "mine" in line]
    assert line[0] == "mine"
    assert line[2:6] == ["dask_cml.discovery.CMLCluster", "cmlcluster", "2", "2"]
    assert line[-1] == "Running"
    assert "CMLCluster.from_name('mine')" in ctl("snippet", "mine")
    assert len(live(platform)) == 3
    assert ctl("delete", "mine") == "Deleted cluster mine.\n"
    assert not live(platform)
    assert run_json("list") == []


CODE = """
import dask_ctl.config  # dask-ctl's functions need it and do not import it
from dask_ctl.lifecycle import create_cluster, delete_cluster, get_cluster, get_snippet, list_clusters
from distributed import Client

if __name__ == "__main__":
    made = create_cluster({spec!r})
    with Client(made) as client:
        assert client.submit(sum, [1, 2]).result() == 3
    [listed] = list_clusters()
    assert listed.name == "mine"
    cluster = get_cluster("mine")
    cluster.scale(2)
    # What the snippet says is what another process does.
    scope = {{}}
    exec(get_snippet("mine"), scope)
    scope["client"].wait_for_workers(2, timeout=120)
    assert scope["client"].submit(sum, [3, 4]).result() == 7
    scope["client"].close()
    delete_cluster("mine")
    print("done")
"""


@pytest.mark.slow
def test_the_functions_of_dask_ctl(platform, spec, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CODE.format(spec=spec))
    # The process that keeps the cluster may say after that how it ended.
    assert "done" in run(str(program)).splitlines()
    assert not live(platform)
    assert run_json("list") == []
