"""The kinds of GPUs and the RDMA networks of a site by name. CML's API v2 knows the ids that launches need.

A launch without such names needs none of this, and no ``cmlapi``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from dask_cml.checks import message
from dask_cml.errors import CMLError
from dask_cml.sessions.answers import NoAnswer, in_words

#: The parameters of ``launch_workers`` with ids, by the launch options with names.
PARAMETERS = {"accelerator_label": "accelerator_label_id", "rdma_network": "rdma_network_selections"}
#: The key of the labels that name networks. All others name kinds of GPUs.
_NETWORK_KEY = "rdma.network.name"


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
        raise kind(f"GPUs and networks not found by name: {in_words(error)}") from error
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
