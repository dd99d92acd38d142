"""GPUs and RDMA networks by their names, which CML's API v2 resolves to ids."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from clusters import arrived, simulate
from simulated.testing import eventually, simulated

from dask_cml import CMLError
from dask_cml.sessions import labels
from dask_cml.sessions.labels import PARAMETERS, resolved

GPU_KEY, NETWORK_KEY = "nvidia.com/gpu.product", "rdma.network.name"
ROCE = "default/roce-network"


def label(id, key, value, availability=True, **more):
    return SimpleNamespace(id=id, label_key=key, label_value=value, availability=availability, **more)


#: As in an answer of CML, whose ids are texts.
LABELS = [
    label("3", GPU_KEY, "A100"),
    label("4", GPU_KEY, "NVIDIA-L4", display_name="L4"),
    label("7", NETWORK_KEY, ROCE),
    label("8", NETWORK_KEY, "default/other"),
    label("9", NETWORK_KEY, "default/broken", availability=False),
]


class ApiException(Exception):
    """As in ``cmlapi.rest``."""

    def __init__(self, status):
        super().__init__(f"({status})\nReason: secret")
        self.status = status


@pytest.fixture
def cmlapi(monkeypatch):
    """Stands in for CML's client of its API v2. Its errors come first."""
    module = ModuleType("cmlapi")
    module.labels, module.errors, module.calls = LABELS, [], 0

    def list_all_accelerator_node_labels():
        module.calls += 1
        if module.errors:
            raise module.errors.pop(0)
        return SimpleNamespace(accelerator_node_label=module.labels)

    functions = SimpleNamespace(list_all_accelerator_node_labels=list_all_accelerator_node_labels)
    module.default_client = lambda: functions
    monkeypatch.setitem(sys.modules, "cmlapi", module)
    labels.known_labels.cache_clear()
    yield module
    labels.known_labels.cache_clear()


def test_names_become_ids(cmlapi):
    pairs = [{"network_label_id": 7, "quantity": 2}, {"network_label_id": 8, "quantity": 1}]
    for options, expected in [
        ({"accelerator_label": "A100"}, {"accelerator_label_id": 3}),
        ({"accelerator_label": "L4", "kernel": "r"}, {"accelerator_label_id": 4, "kernel": "r"}),
        ({"accelerator_label": "NVIDIA-L4"}, {"accelerator_label_id": 4}),
        ({"rdma_network": [[ROCE, 2], ["default/other", 1]]}, {"rdma_network_selections": pairs}),
        ({"rdma_network": []}, {"rdma_network_selections": []}),
    ]:
        assert resolved(options) == expected


def test_options_without_names_need_no_answer_of_cml(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmlapi", None)
    assert resolved({"accelerator_label_id": 3}) == {"accelerator_label_id": 3}


def test_an_error_names_the_option_and_what_the_site_has(cmlapi):
    gpu, network = "launch_options['accelerator_label']", "launch_options['rdma_network']"
    gpus, networks = "a kind of GPU of this site: 'A100', 'L4', 'NVIDIA-L4'", "an RDMA network of this site: "
    networks += "'default/other', 'default/roce-network'"
    for options, words in [
        ({"accelerator_label": "V100"}, f"invalid {gpu}='V100': expected {gpus}"),
        ({"accelerator_label": ROCE}, f"expected {gpus}"),
        ({"accelerator_label": 3}, f"{gpu}=3: expected a kind of GPU"),
        ({"accelerator_label": ["A100"]}, "expected a kind of GPU"),
        (
            {"rdma_network": [["default/broken", 1]]},
            f"invalid {network}='default/broken': expected {networks}",
        ),
        *(
            ({"rdma_network": value}, "expected pairs of a name and a number above 0, such as [(")
            for value in (ROCE, [ROCE], [[ROCE, 0]], [[ROCE, "2"]], [[ROCE, True]], {ROCE: 2})
        ),
        ({"rdma_network": [[ROCE, 1], [ROCE, 1]]}, "expected every network once"),
        (
            {"accelerator_label": "A100", "accelerator_label_id": 3},
            "expected accelerator_label or accelerator_label_id, not both",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            resolved(options)
    labels.known_labels.cache_clear()
    cmlapi.labels = None
    with pytest.raises(ValueError, match="expected a kind of GPU of this site: it has none"):
        resolved({"accelerator_label": "A100"})


# -- clusters


@simulated
async def test_a_cluster_launches_its_sessions_with_the_ids(it, cmlapi):
    for argument in "launch_options", "scheduler_launch_options":
        with pytest.raises(ValueError, match=rf"invalid {argument}\['accelerator_label'\]='V100'"):
            await simulate(name="mine", n_workers=1, **{argument: {"accelerator_label": "V100"}})
    assert not it.platform.all
    labels.known_labels.cache_clear()
    cmlapi.errors = [ApiException(503), OSError("no route to host")]  # which passes
    group = {"n_workers": 1, "launch_options": {"rdma_network": [(ROCE, 2)]}}
    options = {"launch_options": {"accelerator_label": "A100"}, "worker_groups": {"net": group}}
    async with simulate(name="mine", n_workers=1, **options) as cluster:
        assert cluster.problem is None
        await eventually(lambda: arrived(cluster) == 2)
        await cluster.add_worker_group("l4", 1, launch_options={"accelerator_label": "L4"})
        await eventually(lambda: arrived(cluster) == 3)
        with pytest.raises(ValueError, match="'V100': expected a kind of GPU of this site: 'A100'"):
            await cluster.add_worker_group("v100", 1, launch_options={"accelerator_label": "V100"})
        assert "v100" not in cluster.worker_groups
    sent = {}
    for session in it.platform.all.values():
        name, _, _ = session.launched_with["name"].partition(" ")
        sent[name] = [session.launched_with[option] for option in PARAMETERS.values()]
    assert sent == {
        "mine-scheduler": [None, None],
        "mine-0": [3, None],
        "mine-net-0": [None, [{"network_label_id": 7, "quantity": 2}]],
        "mine-l4-0": [4, None],
    }
    assert cmlapi.calls == 4


@simulated
async def test_an_error_says_why_names_are_not_found(it, cmlapi, monkeypatch):
    options = {"name": "mine", "launch_options": {"accelerator_label": "A100"}}
    cmlapi.errors = [ApiException(403)]
    with pytest.raises(CMLError, match=r"^GPUs and networks not found by name: ApiException: \(403\)$"):
        await simulate(**options)
    monkeypatch.setitem(sys.modules, "cmlapi", None)
    with pytest.raises(CMLError, match=r"Install cmlapi, .* or pass accelerator_label_id"):
        await simulate(**options)
    it.platform.launch_workers = it.platform._older_launch
    expected = "invalid launch_options 'accelerator_label': expected parameters of"
    with pytest.raises(ValueError, match=expected):
        simulate(**options)
    assert not it.platform.all
