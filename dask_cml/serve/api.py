"""The URLs and errors of the page's JSON API."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any
from urllib.parse import quote

from tornado.web import HTTPError

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.records import operations, store
from dask_cml.serve.access import Handler, error_text

logger = logging.getLogger(__name__)

_OFFSET = re.compile(r"\d{1,18}", re.ASCII)
_STATUS: dict[type[BaseException], int] = {
    NoSuchCluster: 404,
    ClusterExists: 409,
    CMLError: 503,
    TypeError: 400,
    ValueError: 400,
}


class ApiHandler(Handler):
    """Answers with JSON. Errors are ``{"error": text}``."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the message of an expected error."""
        _, error, _ = kwargs.get("exc_info", (None, None, None))
        words = self._reason
        if isinstance(error, HTTPError):
            words = error_text(error) or words
        else:
            for kind, status in _STATUS.items():
                if isinstance(error, kind):
                    self.set_status(status)
                    words = str(error)
                    break
        self.answer({"error": words})

    def log_exception(self, *exc_info: Any) -> None:
        """Log unexpected errors."""
        if not isinstance(exc_info[1], (*_STATUS, HTTPError)):
            logger.error("Request %s %s failed", self.request.method, self.request.path, exc_info=exc_info)

    def answer(self, content: Any) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(content, allow_nan=False))

    async def answer_details(self, name: str) -> None:
        """Answer with the description of one cluster."""
        self.answer(await self.details(name))

    def body(self, **types: type | tuple[type, ...]) -> dict[str, Any]:
        """Return the request's body, a JSON object.

        Parameters
        ----------
        **types
            The type of each allowed member. Default: all members are allowed.

        Raises
        ------
        ValueError
            If the body is invalid.
        """
        try:
            content = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise ValueError("invalid body: expected a JSON object")
        for name, value in content.items() if types else ():
            if name not in types:
                raise ValueError(f"invalid {name!r} in the body: expected {', '.join(types)}")
            if not isinstance(value, types[name]) or isinstance(value, bool):
                raise ValueError(f"invalid {name}={value!r}: expected {_words(types[name])}")
        return content


def _words(types: type | tuple[type, ...]) -> str:
    names = {int: "a whole number", str: "text", type(None): "null"}
    return " or ".join(names[each] for each in (types if isinstance(types, tuple) else (types,)))


class Clusters(ApiHandler):
    """``/api/clusters``."""

    def get(self) -> None:
        """Describe all clusters."""
        user = self.current_user
        answer = {"clusters": self.clusters.describe(), "problem": self.clusters.problem}
        self.answer({**answer, "user": {"name": user.name, "may_change": user.may_change}})

    async def post(self) -> None:
        """Create a cluster."""
        description = await self.clusters.create(self.body(), self.current_user.name)
        self.set_status(201 if description["status"] == "running" else 202)
        self.set_header("Location", f"/api/clusters/{quote(description['name'], safe='')}")
        self.answer(description)


class Cluster(ApiHandler):
    """``/api/clusters/NAME``."""

    async def get(self, name: str) -> None:
        """Describe a cluster."""
        await self.answer_details(name)

    async def delete(self, name: str) -> None:
        """Stop all sessions of a cluster."""
        await self.clusters.delete(name)
        self.answer({})


class Scale(ApiHandler):
    """``/api/clusters/NAME/scale``."""

    async def post(self, name: str) -> None:
        """Scale a worker group."""
        body = self.body(n=int, worker_group=str)
        if "n" not in body:
            raise ValueError("invalid body: expected n, a whole number")
        self.clusters.scale(name, **body)
        await self.answer_details(name)


class Adapt(ApiHandler):
    """``/api/clusters/NAME/adapt``."""

    async def post(self, name: str) -> None:
        """Adapt a worker group."""
        self.clusters.adapt(name, **self.body(minimum=int, maximum=(int, type(None)), worker_group=str))
        await self.answer_details(name)

    async def delete(self, name: str) -> None:
        """Stop adapting a worker group."""
        self.clusters.stop_adapting(name, self.get_query_argument("worker_group", DEFAULT_GROUP))
        await self.answer_details(name)


class Logs(ApiHandler):
    """``/api/clusters/NAME/logs``."""

    async def get(self, name: str) -> None:
        """Return a part of a session's log, or the names of all sessions with logs."""
        session, offset = self.get_query_argument("session", None), self.get_query_argument("offset", None)
        if offset is not None and not _OFFSET.fullmatch(offset):
            raise ValueError(f"invalid offset={offset!r}: expected a whole number")

        def read() -> dict[str, Any]:
            logs = operations.session_logs(store.read(name))
            if session is None:
                return {"sessions": [*logs.paths()]}
            text, end = logs.part(session, None if offset is None else int(offset))
            return {"session": session, "text": text, "offset": end}

        self.answer(await asyncio.to_thread(read))


ROUTES = [
    (r"/api/clusters", Clusters),
    (r"/api/clusters/([^/]+)", Cluster),
    (r"/api/clusters/([^/]+)/scale", Scale),
    (r"/api/clusters/([^/]+)/adapt", Adapt),
    (r"/api/clusters/([^/]+)/logs", Logs),
]
