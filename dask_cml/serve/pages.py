"""Placeholder."""

from __future__ import annotations

from typing import Any

from tornado.web import HTTPError

from dask_cml.serve.access import Handler


class NotFound(Handler):
    """Answer requests for addresses that do not exist."""

    def prepare(self) -> None:
        """Answer."""
        super().prepare()
        raise HTTPError(404)


ROUTES: list[Any] = []
