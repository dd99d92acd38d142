"""What CML's API v2 says of the user's quota. It only adds to messages.

Not every workbench answers. So nothing here raises an error, and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from dask_cml.options.limits import Sessions
from dask_cml.output import get_logger
from dask_cml.sessions.here import this_user

logger = get_logger(__name__)

#: Seconds for each part of an answer.
PATIENCE = 3.0
#: The entries of one answer: administrators see all users.
_QUOTAS = "usersquota?page_size=500"
#: The amounts of a quota, with their units.
_UNITS = {"cpu": "vCPU", "memory": "GiB", "nvidia_gpu": "GPU"}
#: Sums of amounts such as 0.1 are a little more than the amounts.
_TOLERANCE = 1e-9


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
