"""CML's API v2: what the user's quota leaves, ids of GPUs and networks, and how it may misbehave."""

import asyncio
import logging
import re
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest
from clusters import arrived, lines_of, simulate
from simulated.testing import eventually, simulated
from workbench import (
    KEY,
    closes_the_connection,
    never_answers,
    quota,
    redirects,
    refuses,
    shows_a_page,
    workbench,
    writes,
)

from dask_cml import CMLError
from dask_cml.core import workers
from dask_cml.options import SessionSize
from dask_cml.sessions import api_v2
from dask_cml.sessions.api_v2 import PARAMETERS, known_labels, resolved


async def quota_left():
    return await asyncio.to_thread(api_v2.quota_left)


async def test_the_quota_leaves_what_is_not_used_in_a_project_of_the_user(monkeypatch):
    async with workbench() as it:
        for entries, left in [
            ([quota()], {"cpu": 12, "memory": 240}),
            ([quota("bob"), quota("eve"), quota(used=("64.5", "0", "0"))], {"cpu": 0, "memory": 256}),
            ([quota(most=("8", "32", "2"), used=(1.5, 4, 1))], {"cpu": 6.5, "memory": 28, "nvidia_gpu": 1}),
            ([quota(most=("0", "-1", ""))], {}),
            ([quota(most=("8", "32Gi", "nan"))], {}),
            ([quota("bob")], {}),
            ([], {}),
        ]:
            it.quotas = entries
            assert await quota_left() == left
        it.asked.clear()
        it.quotas = [quota()]
        for missing in ("CDSW_APIV2_KEY", "CDSW_DOMAIN", "CDSW_PROJECT_URL"):
            with monkeypatch.context() as patch:
                patch.delenv(missing)
                assert await quota_left() == {}
        monkeypatch.setenv("CDSW_PROJECT_URL", f"http://{it}/api/v1/projects/team/demo")
        assert await quota_left() == {}
        assert not it.asked


def test_a_shortage_names_what_is_short_only():
    sessions = [(SessionSize(4, 16, 1), 10), (SessionSize(0.1, 2), 3)]
    left = {"cpu": 12.5, "memory": 166.0, "nvidia_gpu": 4.0}
    words = "its workers need 40.3 vCPU and 10 GPU, but your quota leaves 12.5 vCPU and 4 GPU"
    assert api_v2.shortage(sessions, left) == words
    assert api_v2.shortage(sessions, {"cpu": 40.3, "memory": 166.0}) is None
    assert api_v2.shortage([(SessionSize(0.1, 1), 3)], {"cpu": 0.3}) is None
    assert api_v2.shortage(sessions, {}) is None


@pytest.mark.slow
async def test_without_an_answer_in_its_form_nothing_is_known_and_the_key_is_in_no_log(monkeypatch, caplog):
    monkeypatch.setattr(api_v2, "PATIENCE", 0.5)
    caplog.set_level(logging.DEBUG)
    async with workbench() as it:
        for it.misbehaves in [
            never_answers,
            shows_a_page,
            closes_the_connection,
            *map(refuses, (401, 403, 404, 500)),
            *map(writes, ("", "[]", "null", "{}", '"text"', '{"user_quota": 5}', '{"user_quota": "no"}')),
            writes('{"user_quota": [null, [], {"user": []}]}'),
            writes('{"user_quota": [{"user": {"user_name": "ann"}, "quota_usage": null}]}'),
        ]:
            assert await quota_left() == {}
        monkeypatch.setenv("CDSW_APIV2_KEY", f"{KEY}\r\nX-Header: 1")
        it.asked.clear()
        assert await quota_left() == {}
        assert not it.asked
    assert KEY not in caplog.text


async def test_a_redirected_request_does_not_show_the_key():
    keys = []

    async def note(handler):
        keys.append(handler.request.headers.get("Authorization"))
        await redirects(handler)

    async with workbench() as it:
        it.misbehaves = note
        assert await quota_left() == {}
    assert keys[0] == f"Bearer {KEY}"
    assert {*keys[1:]} == {None}


@pytest.mark.parametrize("misbehaves", [None, refuses(401)])
@simulated
async def test_a_start_says_nothing_of_a_quota_that_suffices_or_is_unknown(it, misbehaves):
    it.platform.latency = 1.0
    async with workbench() as platform:
        platform.quotas = [quota(most=("8", "64", "0"), used=("4", "8", "0"))]
        platform.misbehaves = misbehaves
        async with simulate(n_workers=2, cpu=1, memory=1) as cluster:
            assert not lines_of(cluster)
        assert len(platform.asked) == 1


@simulated
async def test_a_start_does_not_believe_an_answer_that_comes_after_the_workers_launch(it, monkeypatch):
    """It may count them as used."""
    answer = Future()
    monkeypatch.setattr(workers, "start_call", lambda function: answer)
    async with simulate(n_workers=2, cpu=1, memory=1) as cluster:
        answer.set_result({"cpu": 0.5})
        await eventually(lambda: arrived(cluster) == 2)
        assert not lines_of(cluster)


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
    known_labels.cache_clear()
    yield module
    known_labels.cache_clear()


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
    known_labels.cache_clear()
    cmlapi.labels = None
    with pytest.raises(ValueError, match="expected a kind of GPU of this site: it has none"):
        resolved({"accelerator_label": "A100"})


@simulated
async def test_a_cluster_launches_its_sessions_with_the_ids(it, cmlapi):
    for argument in "launch_options", "scheduler_launch_options":
        with pytest.raises(ValueError, match=rf"invalid {argument}\['accelerator_label'\]='V100'"):
            await simulate(name="mine", n_workers=1, **{argument: {"accelerator_label": "V100"}})
    assert not it.platform.all
    known_labels.cache_clear()
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
