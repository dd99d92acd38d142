"""The responses to HTTP requests of the local platform, with the attributes that callers use."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to an HTTP request.

    Parameters
    ----------
    status_code : int
        The HTTP status.

    Examples
    --------
    >>> Response(404).ok
    False
    """

    status_code: int

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status_code < 400
