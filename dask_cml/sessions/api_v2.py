"""What CML's API v2 says of ended sessions and of the user's quota. It only adds to messages.

Not every workbench answers, and no document says whether the answers cover worker sessions. So nothing here
raises an error, and nothing takes longer than :data:`PATIENCE`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Collection, Coroutine, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from dask_cml.cancellation import within
from dask_cml.options.limits import Sessions
from dask_cml.output import Logger
from dask_cml.sessions.here import this_user
from dask_cml.words import printable, shortened

logger = Logger(__name__)

#: Seconds for all answers to one question. The replacement of a lost worker may wait for it.
PATIENCE = 3.0
#: Number of entries that one answer may have.
_PAGE_SIZE = 500
_LONGEST = 200
#: What Kubernetes says of a pod that needs more memory than it may.
_OOM_KILLED = "OOMKilled"
#: The amounts of a quota, with their units.
_UNITS = {"cpu": "vCPU", "memory": "GiB", "nvidia_gpu": "GPU"}
#: Sums of amounts such as 0.1 are a little more than the amounts.
_TOLERANCE = 1e-9


async def reasons(sessions: Collection[str]) -> dict[str, str]:
    """Return why sessions have ended, in a line each, by their ids. Omit what the platform does not say."""
    found: dict[str, str] = {}
    if sessions:
        await _in_time(_find_reasons(sessions, found))
    return {session: reason for session, reason in found.items() if reason}


async def _find_reasons(sessions: Collection[str], found: dict[str, str]) -> None:
    token = ""
    while len(found) < len(sessions):
        entries, token = await _page("usage", "usage_response", token, sort="-created_at")
        for entry in entries:
            # No document says whether the id is the session's. The workload's URL contains it, too.
            words = {str(entry.get("id")), *re.split(r"\W", str(entry.get("workload_url")))}
            for session in words.intersection(sessions):
                found.setdefault(session, _reason(entry))
        if not token:
            return


def _reason(entry: Mapping[str, Any]) -> str:
    """Return why a session ended, by its entry. Return nothing if the entry does not say it."""
    kubernetes = entry.get("k8s_info")
    if not isinstance(kubernetes, dict):
        kubernetes = {}
    said = [kubernetes.get("k8s_reason"), kubernetes.get("k8s_message") or entry.get("message")]
    if entry.get("oom_killed") is True and said[0] != _OOM_KILLED:
        said.insert(0, _OOM_KILLED)
    words = [word.rstrip(" .") for word in said if isinstance(word, str) and word != "Completed"]
    reason = ": ".join(filter(None, words))
    code = kubernetes.get("k8s_exit_code")
    if isinstance(code, int) and code:
        reason += f" (exit code {code})" if reason else f"exit code {code}"
    return shortened(printable(" ".join(reason.split())), _LONGEST)


async def quota_left() -> dict[str, float]:
    """Return what the user's quota leaves: ``cpu``, ``memory`` in GiB, ``nvidia_gpu``. Omit what is unknown.

    In a project of a team, or of another user, another quota may count. Then nothing is known.
    """
    left: dict[str, float] = {}
    if _project_owner() == this_user():
        await _in_time(_find_quota(left))
    return left


def _project_owner() -> str | None:
    """Return the name of the project's owner, from a URL such as ``https://<domain>/api/v1/projects/<owner>/<name>``."""
    path = urlsplit(os.environ.get("CDSW_PROJECT_URL", "")).path
    match = re.search(r"/projects/([^/]+)/", path)
    return match[1] if match else None


async def _find_quota(left: dict[str, float]) -> None:
    token = ""
    while True:
        entries, token = await _page("usersquota", "user_quota", token)
        for entry in entries:
            user = entry.get("user")
            if not isinstance(user, dict) or user.get("user_name") != this_user():
                continue  # administrators see all users
            for name in _UNITS:
                most, used = float(entry["quota_configured"][name]), float(entry["quota_usage"][name])
                if math.isfinite(most - used) and most > 0:  # without a quota it is 0
                    left[name] = max(0.0, most - used)
            return
        if not token:
            return


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


async def _in_time(looking: Coroutine[Any, Any, None]) -> None:
    """Wait for some seconds until something is found. Drop all errors."""
    try:
        await within(PATIENCE, looking)
    except Exception as error:  # of tornado, or of an answer in any shape
        # Not the error's text, which may contain the key.
        logger.debug("No answer of CML's API v2: %s %s", type(error).__name__, getattr(error, "code", ""))


async def _page(path: str, field: str, token: str, **query: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the entries of one page, and the token of the next page. The last page has none.

    Raises
    ------
    Exception
        If there is no such answer.
    """
    if token:
        query["page_token"] = token
    answer = await _get(path, {**query, "page_size": _PAGE_SIZE})
    entries = [entry for entry in answer.get(field) or () if isinstance(entry, dict)]
    return entries, answer.get("next_page_token") or ""


async def _get(path: str, query: Mapping[str, Any]) -> dict[str, Any]:
    scheme = urlsplit(os.environ.get("CDSW_PROJECT_URL", "")).scheme or "https"
    key = os.environ["CDSW_APIV2_KEY"].strip()
    request = HTTPRequest(
        f"{scheme}://{os.environ['CDSW_DOMAIN']}/api/v2/{path}?{urlencode(query)}",
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
