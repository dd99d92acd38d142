"""What CML's API v2 says: what the user's quota leaves, and the ids of a site's GPUs and RDMA networks.

Not every workbench answers. The quota only adds to messages, so it raises no error, and nobody waits for it.
Launch options may name GPUs and networks. Other launches need no ``cmlapi``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from dask_cml.checks import message
from dask_cml.errors import CMLError, NoAnswer
from dask_cml.options import Sessions
from dask_cml.output import get_logger
from dask_cml.sessions.here import this_user
from dask_cml.words import first_line

logger = get_logger(__name__)

#: Seconds for each part of an answer.
PATIENCE = 3.0
#: The entries of one answer: administrators see all users.
_QUOTAS = "usersquota?page_size=500"
#: The amounts of a quota, with their units.
_UNITS = {"cpu": "vCPU", "memory": "GiB", "nvidia_gpu": "GPU"}
#: Sums of amounts such as 0.1 are a little more than the amounts.
_TOLERANCE = 1e-9
#: The parameters of ``launch_workers`` with ids, by the launch options with names.
PARAMETERS = {"accelerator_label": "accelerator_label_id", "rdma_network": "rdma_network_selections"}
#: The key of the labels that name networks. All others name kinds of GPUs.
_NETWORK_KEY = "rdma.network.name"


def quota_left() -> dict[str, float]:
    """Return what the user's quota leaves: ``cpu``, ``memory`` in GiB, ``nvidia_gpu``. Omit what is unknown.

    Blocks for some seconds, or longer if the answer comes in small parts.

    In a project of a team, or of another user, another quota may count. Then nothing is known.
    """
    # Such as https://<domain>/api/v1/projects/<owner>/<name>
    project = urlsplit(os.environ.get("CDSW_PROJECT_URL", ""))
    if f"/projects/{this_user()}/" not in project.path:
        return {}
    try:
        answer = _get(f"{project.scheme}://{os.environ['CDSW_DOMAIN']}/api/v2/{_QUOTAS}")
        entry = next(entry for entry in answer["user_quota"] if entry["user"]["user_name"] == this_user())
        most, used = entry["quota_configured"], entry["quota_usage"]
        limited = [name for name in _UNITS if float(most[name]) > 0]  # without a quota it is 0
        return {name: max(0.0, float(most[name]) - float(used[name])) for name in limited}
    except Exception as error:  # of urllib, or of an answer in any shape
        # Not the error's text, which may contain the key.
        logger.debug("No answer of CML's API v2: %s %s", type(error).__name__, getattr(error, "code", ""))
        return {}


def shortage(sessions: Sessions, left: Mapping[str, float]) -> str | None:
    """Return a clause if sessions need more than a quota leaves.

    Parameters
    ----------
    sessions : sequence
        The sizes of the sessions, each with their number.
    left : mapping of str to float
        What the quota leaves, from :func:`quota_left`.

    Examples
    --------
    >>> from dask_cml.options import SessionSize
    >>> shortage([(SessionSize(4, 16), 10)], {"cpu": 12.0, "memory": 256.0})
    'its workers need 40 vCPU, but your quota leaves 12 vCPU'
    """
    needed = {name: sum(n * getattr(size, name) for size, n in sessions) for name in left}
    short = [name for name in left if needed[name] > left[name] + _TOLERANCE]

    def words(amounts: Mapping[str, float]) -> str:
        return " and ".join(f"{amounts[name]:.10g} {_UNITS[name]}" for name in short)

    return f"its workers need {words(needed)}, but your quota leaves {words(left)}" if short else None


def _get(url: str) -> Any:
    request = Request(url)
    # Another server, to which an answer may lead, must not get it.
    request.add_unredirected_header("Authorization", f"Bearer {os.environ['CDSW_APIV2_KEY'].strip()}")
    authorities = os.environ.get("REQUESTS_CA_BUNDLE")  # as the Workers API does
    context = ssl.create_default_context(cafile=authorities)
    with urlopen(request, timeout=PATIENCE, context=context) as answer:
        return json.load(answer)


# -- GPUs and networks


def resolved(options: Mapping[str, Any], argument: str = "launch_options") -> dict[str, Any]:
    """Return launch options with ids instead of the names of GPUs and networks. May block.

    Parameters
    ----------
    options : mapping
        ``accelerator_label`` is the name of a kind of GPU, such as ``"A100"``. ``rdma_network`` is a list of
        pairs: the name of a network and how many of its devices a session gets. All others stay as they are.
    argument : str
        The argument with these options, for messages.

    Raises
    ------
    ValueError
        If an option is invalid, or no label has the name. The message lists the known names.
    CMLError
        If this process has no ``cmlapi``, or CML refuses to say the labels.
    NoAnswer
        If CML does not answer.
    """
    found = {name: value for name, value in options.items() if name not in PARAMETERS}
    for name, parameter in PARAMETERS.items():
        if name in options and parameter in options:
            expected = f"{name} or {parameter}, not both"
            raise ValueError(message(f"{argument}[{name!r}]", options[name], expected))
    if "accelerator_label" in options:
        gpus, _ = known_labels()
        place = f"{argument}['accelerator_label']"
        found["accelerator_label_id"] = _find(place, options["accelerator_label"], "a kind of GPU", gpus)
    if "rdma_network" in options:
        found["rdma_network_selections"] = _networks(f"{argument}['rdma_network']", options["rdma_network"])
    return found


def _networks(place: str, pairs: Any) -> list[dict[str, int]]:
    """Return the selections of networks for ``launch_workers``."""
    are_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not are_pairs or any(type(n) is not int or n < 1 for _, n in pairs):
        expected = 'pairs of a name and a number above 0, such as [("default/roce-network", 2)]'
        raise ValueError(message(place, pairs, expected))
    _, networks = known_labels()
    ids = [_find(place, name, "an RDMA network", networks) for name, _ in pairs]
    if len({*ids}) < len(ids):
        raise ValueError(message(place, pairs, "every network once"))
    return [{"network_label_id": id, "quantity": n} for id, (_, n) in zip(ids, pairs, strict=True)]


def _find(place: str, name: Any, noun: str, ids: Mapping[str, int]) -> int:
    """Return the id of the label with this name."""
    if not isinstance(name, str) or name not in ids:
        expected = f"{noun} of this site: {', '.join(map(repr, sorted(ids))) or 'it has none'}"
        raise ValueError(message(place, name, expected))
    return ids[name]


@functools.cache
def known_labels() -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of the site's kinds of GPUs, and of its networks, by name. A label may have two names.

    CML is asked once in a process, unless it does not answer.

    Raises
    ------
    CMLError
        If this process has no ``cmlapi``, or CML refuses to say the labels.
    NoAnswer
        If CML does not answer.
    """
    try:
        cmlapi = importlib.import_module("cmlapi")
    except ImportError as error:
        raise CMLError(
            f"GPUs and networks not found by name: {error}. Install cmlapi, which CML serves at "
            "https://<your workbench>/api/v2/python.tar.gz, or pass accelerator_label_id or "
            "rdma_network_selections"
        ) from error
    try:
        answer = cmlapi.default_client().list_all_accelerator_node_labels()
    except Exception as error:  # of cmlapi, or of urllib3 below it
        status = getattr(error, "status", None) or 500
        kind = CMLError if status < 500 else NoAnswer
        words = first_line(f"{type(error).__name__}: {error}")
        raise kind(f"GPUs and networks not found by name: {words}") from error
    gpus: dict[str, int] = {}
    networks: dict[str, int] = {}
    for label in answer.accelerator_node_label or ():
        is_network = label.label_key == _NETWORK_KEY
        if is_network and label.availability is False:
            continue
        for name in (label.label_value, getattr(label, "display_name", None)):
            if name:
                (networks if is_network else gpus)[str(name)] = int(label.id)
    return gpus, networks
