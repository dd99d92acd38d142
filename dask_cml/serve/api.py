"""The URLs and errors of the web UI's JSON API."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import quote

from dask_cml.naming import DEFAULT_GROUP
from dask_cml.serve.access import Handler

_OFFSET = re.compile(r"\d{1,18}", re.ASCII)


class ApiHandler(Handler):
    """Answers with JSON. Errors are ``{"error": text}``."""

    def answer(self, content: Any) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(content, allow_nan=False))

    def answer_error(self, message: str) -> None:
        """Answer with the reason of an error."""
        self.answer({"error": message})

    async def create(self, options: dict[str, Any]) -> None:
        """Create a cluster of the request's user, and describe it."""
        description = await self.details(await self.clusters.create(options, self.current_user.name))
        self.set_status(201 if description["status"] == "running" else 202)
        self.set_header("Location", f"/api/clusters/{quote(description['name'], safe='')}")
        self.answer(description)

    def body(self, *names: str) -> dict[str, Any]:
        """Return the request's body, a JSON object.

        Parameters
        ----------
        *names : str
            The allowed members. Default: all.

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
        if unknown := [name for name in content if names and name not in names]:
            raise ValueError(f"invalid {unknown[0]!r} in the body: expected {', '.join(names)}")
        return content


class Clusters(ApiHandler):
    """``/api/clusters``."""

    def get(self) -> None:
        """Describe all clusters."""
        user = self.current_user
        answer = {"clusters": self.clusters.describe(), "problem": self.clusters.problem}
        self.answer({**answer, "user": {"name": user.name, "may_change": user.may_change}})

    async def post(self) -> None:
        """Create a cluster."""
        await self.create(self.body())


class History(ApiHandler):
    """``/api/history`` and ``/api/history/ID``."""

    async def get(self, id: str | None = None) -> None:
        """Describe the clusters that have ended, or one of them."""
        described = [cluster.describe() for cluster in await self.clusters.ended(id)]
        self.answer({"clusters": described} if id is None else described[0])


class Cluster(ApiHandler):
    """``/api/clusters/NAME``."""

    async def get(self, name: str) -> None:
        """Describe a cluster."""
        self.answer(await self.details(name))

    async def delete(self, name: str) -> None:
        """Stop all sessions of a cluster."""
        await self.clusters.delete(name, self.current_user.name)
        self.answer({})


class Scale(ApiHandler):
    """``/api/clusters/NAME/scale``."""

    async def post(self, name: str) -> None:
        """Scale a worker group."""
        body = self.body("n", "worker_group")
        if "n" not in body:
            raise ValueError("invalid body: expected n, a whole number")
        async with self.clusters.changing(name) as cluster:
            await cluster.scale(**body)
        self.answer(await self.details(name))


class Adapt(ApiHandler):
    """``/api/clusters/NAME/adapt``."""

    async def post(self, name: str) -> None:
        """Adapt a worker group."""
        limits = self.body("minimum", "maximum", "worker_group")
        async with self.clusters.changing(name) as cluster:
            cluster.adapt(**limits)
        self.answer(await self.details(name))

    async def delete(self, name: str) -> None:
        """Stop adapting a worker group."""
        group = self.get_query_argument("worker_group", DEFAULT_GROUP)
        async with self.clusters.changing(name) as cluster:
            cluster.groups.options(group)  # which must exist
            cluster._stop_adapting(group)
        self.answer(await self.details(name))


class Logs(ApiHandler):
    """``/api/clusters/NAME/logs``."""

    async def get(self, name: str) -> None:
        """Return a part of a session's log, or the names of all sessions with logs."""
        session, offset = self.get_query_argument("session", None), self.get_query_argument("offset", None)
        if offset is not None and not _OFFSET.fullmatch(offset):
            raise ValueError(f"invalid offset={offset!r}: expected a whole number")
        logs = self.clusters.find(name).logs()
        if session is None:
            self.answer({"sessions": [*await asyncio.to_thread(logs.paths)]})
        else:
            begin = None if offset is None else int(offset)
            text, end = await asyncio.to_thread(logs.part, session, begin)
            self.answer({"session": session, "text": text, "offset": end})


ROUTES = [
    (r"/api/clusters", Clusters),
    (r"/api/history(?:/([^/]+))?", History),
    (r"/api/clusters/([^/]+)", Cluster),
    (r"/api/clusters/([^/]+)/scale", Scale),
    (r"/api/clusters/([^/]+)/adapt", Adapt),
    (r"/api/clusters/([^/]+)/logs", Logs),
]
