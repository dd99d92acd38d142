"""What CML's API v2 says of the user's quota. It only adds to messages.

Not every workbench answers. So nothing here raises an error, and nothing takes longer than :data:`PATIENCE`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from dask_cml.cancellation import within
from dask_cml.options.limits import Sessions
from dask_cml.output import get_logger
from dask_cml.sessions.here import this_user

logger = get_logger(__name__)

#: Seconds for all answers to one question.
PATIENCE = 3.0
#: Number of entries that one answer may have.
_PAGE_SIZE = 500
#: The amounts of a quota, with their units.
_UNITS = {"cpu": "vCPU", "memory": "GiB", "nvidia_gpu": "GPU"}
#: Sums of amounts such as 0.1 are a little more than the amounts.
_TOLERANCE = 1e-9


async def quota_left() -> dict[str, float]:
    """Return what the user's quota leaves: ``cpu``, ``memory`` in GiB, ``nvidia_gpu``. Omit what is unknown.

    In a project of a team, or of another user, another quota may count. Then nothing is known.
    """
    if _project_owner() != this_user():
        return {}
    try:
        return await within(PATIENCE, _find_quota())
    except Exception as error:  # of tornado, or of an answer in any shape
        # Not the error's text, which may contain the key.
        logger.debug("No answer of CML's API v2: %s %s", type(error).__name__, getattr(error, "code", ""))
        return {}


def _project_owner() -> str | None:
    """Return the name of the project's owner, from a URL such as ``https://<domain>/api/v1/projects/<owner>/<name>``."""
    path = urlsplit(os.environ.get("CDSW_PROJECT_URL", "")).path
    match = re.search(r"/projects/([^/]+)/", path)
    return match[1] if match else None


async def _find_quota() -> dict[str, float]:
    query = {"page_size": str(_PAGE_SIZE)}
    while True:
        answer = await _get(f"usersquota?{urlencode(query)}")
        for entry in answer["user_quota"]:  # administrators see all users
            if entry["user"]["user_name"] == this_user():
                most, used = entry["quota_configured"], entry["quota_usage"]
                limited = [name for name in _UNITS if float(most[name]) > 0]  # without a quota it is 0
                return {name: max(0.0, float(most[name]) - float(used[name])) for name in limited}
        if not answer["next_page_token"]:
            return {}
        query["page_token"] = answer["next_page_token"]


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
    needed, short = [], []
    for name, amount in left.items():
        need = sum(n * getattr(size, name) for size, n in sessions)
        if need > amount + _TOLERANCE:
            needed.append(f"{need:.10g} {_UNITS[name]}")
            short.append(f"{amount:.10g} {_UNITS[name]}")
    if not short:
        return None
    return f"its workers need {' and '.join(needed)}, but your quota leaves {' and '.join(short)}"


async def _get(path: str) -> dict[str, Any]:
    scheme = urlsplit(os.environ.get("CDSW_PROJECT_URL", "")).scheme or "https"
    key = os.environ["CDSW_APIV2_KEY"].strip()
    request = HTTPRequest(
        f"{scheme}://{os.environ['CDSW_DOMAIN']}/api/v2/{path}",
        headers={"Authorization": f"Bearer {key}"},
        connect_timeout=PATIENCE,
        request_timeout=PATIENCE,
        follow_redirects=False,  # tornado would send the key along
        ca_certs=os.environ.get("REQUESTS_CA_BUNDLE"),  # as the Workers API does
    )
    fetching = asyncio.ensure_future(AsyncHTTPClient().fetch(request))
    fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
    # A cancellation leaves the request to its time limit: tornado would log the error of a cancelled request.
    await asyncio.wait([fetching])
    answer: dict[str, Any] = json.loads(fetching.result().body)
    return answer
