"""Check whether a program can call a web UI that runs as an Application of CML, and whom it sees then."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

from dask_cml.checks import WEB_LINK, message
from dask_cml.doctor.environment import Finding
from dask_cml.words import printable, shortened

#: The variable with an API key of CML, which is no argument, because others see arguments.
_KEY = "DASK_CML_APPLICATION_KEY"
_CREATE = "Create an API key in CML's user settings, with the audience Application"
_WITH_TOKEN = "also send the web UI's token in the header Dask-CML-Token"
_LONGEST = 200


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would lead to a login, and take the key along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def open_application(url: str, timeout: float) -> Finding:
    """Open a web UI with an API key only, and say what it says of its user.

    Parameters
    ----------
    url : str
        The address of the Application.
    timeout : float
        Time limit of the answer, in seconds.
    """
    if not WEB_LINK.fullmatch(url):
        return Finding("wrong", f"{message('--application', url, 'an address that begins with https://')}.")
    key = os.environ.get(_KEY, "").strip()
    if not key:
        return Finding("wrong", f"The variable {_KEY} is not set. {_CREATE}, and set the variable to it.")
    try:
        status, body = _get(f"{url.rstrip('/')}/api/clusters", key, timeout)
    except (OSError, ValueError) as error:
        return Finding("wrong", f"{url} does not answer: {error}")
    try:
        answer = json.loads(body)
        user, refusal = answer.get("user"), answer.get("error")
    except (ValueError, AttributeError):  # a page of CML's entry
        user = refusal = None
    if status == 401 and isinstance(refusal, str):
        return Finding("warning", f"{url} opens with the API key, but CML names no user: {_WITH_TOKEN}.")
    if isinstance(refusal, str):
        said = shortened(printable(refusal), _LONGEST)
        return Finding("wrong", f"{url} opens with the API key, but refuses the request: {said}")
    if not isinstance(user, dict):
        words = f"{url} does not open with the API key, or is no web UI of dask-cml: its answer is {status}."
        return Finding("wrong", f"{words} {_CREATE}.")
    words = f"{url} opens with the API key, and CML names {printable(str(user.get('name')))} in REMOTE-USER"
    if user.get("may_change") is True:
        return Finding("ok", f"{words}, who may change clusters.")
    return Finding("warning", f"{words}, who may not change clusters there. To change them, {_WITH_TOKEN}.")


def _get(url: str, key: str, timeout: float) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    context = ssl.create_default_context(cafile=os.environ.get("REQUESTS_CA_BUNDLE"))
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
