"""The responses to HTTP requests of the local platform, with the attributes that callers use."""

from __future__ import annotations

import dataclasses
import http.client
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to an HTTP request.

    Parameters
    ----------
    status_code : int
        The HTTP status.
    text : str
        The body.

    Examples
    --------
    >>> Response(404).ok
    False
    """

    status_code: int
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status_code < 400

    @property
    def reason(self) -> str:
        """The status in words."""
        return http.client.responses.get(self.status_code, "")

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.text)

    def raise_for_status(self) -> None:
        """Raise an :class:`HTTPError` if the status is 400 or above."""
        if not self.ok:
            raise HTTPError(self)


class HTTPError(OSError):
    """The response to an HTTP request is an error. Its `response` is a :class:`Response`."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"{response.status_code} {response.reason}".strip())
        self.response = response


class JSONDecodeError(OSError, ValueError):
    """A response is not JSON. An OSError and a ValueError, like the error of `requests`."""
