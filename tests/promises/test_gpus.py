"""Workers with GPUs: which GPU each one sees, and what a user is told if there is none. No GPU is needed."""

import os
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from clusters import arrived, connected, log_of, make, simulate, supplied
from distributed import Client
from simulated.testing import simulated


def label(number: str, key: str, value: str) -> SimpleNamespace:
    return SimpleNamespace(id=number, label_key=key, label_value=value, display_name=None, availability=True)


#: Those of one site.
LABELS = [
    label("3", "nvidia.com/gpu.product", "A100"),
    label("7", "rdma.network.name", "default/roce-network"),
]


@pytest.fixture
def cmlapi(monkeypatch):
    module = ModuleType("cmlapi")
    answer = SimpleNamespace(accelerator_node_label=LABELS)
    module.default_client = lambda: SimpleNamespace(list_all_accelerator_node_labels=lambda: answer)
    monkeypatch.setitem(sys.modules, "cmlapi", module)


async def seen(client):
    """Return the GPUs that each worker sees, by the worker's name."""
    answers = await client.run(lambda dask_worker: (dask_worker.name, os.environ.get("CUDA_VISIBLE_DEVICES")))
    return dict(answers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "options", "expected"),
    [(2, {}, ["0", "1"]), (1, {}, [None, None]), (2, {"env": {"CUDA_VISIBLE_DEVICES": "1"}}, ["1", "1"])],
    ids=["all found", "too few found", "set by the user"],
)
async def test_each_worker_of_a_session_sees_its_own_gpu(
    platform, nvidia_smi, holds, found, options, expected
):
    nvidia_smi(found)
    async with (
        make(name="night", n_workers=1, cpu=2, nvidia_gpu=2, **options) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        await holds(lambda: connected(cluster) == {"night-0-0", "night-0-1"})
        named = {"night-0-0": expected[0], "night-0-1": expected[1]}
        assert await seen(client) == named
        said = None
        while said is None or len(said) < 2 * (found == 1):  # it is in the log a moment later
            log = (await cluster.get_logs())["night-0"]
            said = re.findall(r"WARNING - Worker night-0-(\d): 1 of 2 GPUs found in this session", log)
        assert sorted(said) == (["0", "1"] if found == 1 else [])
        await client.restart()
        assert await seen(client) == named


@pytest.mark.images
@pytest.mark.parametrize("worker_args", [[], ["--no-nanny"]])
async def test_a_session_without_a_gpu_is_told_and_its_workers_start_nevertheless(
    platform, nvidia_smi, holds, worker_args
):
    nvidia_smi(0)
    group = {"n_workers": 2, "nvidia_gpu": 1, "worker_args": worker_args}
    async with (
        make(name="night", worker_groups={"gpu": group}) as cluster,
        make(name="night", create_mode="connect") as other,
        Client(cluster, asynchronous=True) as client,
    ):
        await holds(lambda: arrived(cluster) == 2)
        assert await client.submit(sum, [1, 2], resources={"GPU": 1}) == 3
        words = (
            r"worker night-gpu-\d found 0 of 1 GPUs in its session(, and so did 1 more)?; tasks run there "
            "nevertheless; start from an image with CUDA, or ask your CML administrator"
        )
        await holds(lambda: "1 more" in str(cluster.problem) and "1 more" in str(other.problem))
        await holds(lambda: "GPU" in log_of(cluster))
        assert re.fullmatch(words, cluster.problem)
        assert re.fullmatch(words, other.problem)
        assert re.fullmatch(f"Cluster night: {words}", log_of(cluster))
        assert re.search(f"problem: {words}", repr(cluster))


@simulated
async def test_a_kind_of_gpu_and_a_network_are_chosen_by_their_names_before_anything_is_launched(it, cmlapi):
    words = r"'accelerator_label'\]='V100': expected a kind of GPU of this site: 'A100'"
    with pytest.raises(ValueError, match=words):
        await simulate(n_workers=1, nvidia_gpu=1, launch_options={"accelerator_label": "V100"})
    assert it.platform.all == {}
    options = {"accelerator_label": "A100", "rdma_network": [("default/roce-network", 2)]}
    async with supplied(n_workers=1, nvidia_gpu=1, launch_options=options):
        [arguments] = [sent for sent in it.platform.arguments("launch_workers") if sent["nvidia_gpu"]]
        assert arguments["accelerator_label_id"] == 3
        assert arguments["rdma_network_selections"] == [{"network_label_id": 7, "quantity": 2}]
