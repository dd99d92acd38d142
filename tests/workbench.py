"""Stands in for the API v2 of a workbench."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

KEY = "key-of-the-user"
USER = "ann"


class Workbench:
    """What the API v2 answers, and what it was asked."""

    def __init__(self) -> None:
        self.quotas: list[Any] = []
        #: Answers instead. It gets the handler of the request.
        self.misbehaves: Callable[[RequestHandler], Any] | None = None
        self.asked: list[str] = []

    def answer(self) -> dict[str, Any]:
        """Return the only page of entries, as CML's documentation describes it."""
        return {"user_quota": self.quotas, "next_page_token": "", "total_count": str(len(self.quotas))}


class _Handler(RequestHandler):
    def initialize(self, workbench: Workbench) -> None:
        self.workbench = workbench

    async def get(self) -> None:
        self.workbench.asked.append(self.request.uri or "")
        if self.workbench.misbehaves is not None:
            await self.workbench.misbehaves(self)
        elif self.request.headers.get("Authorization") != f"Bearer {KEY}":
            self.set_status(401)
            self.write({"error": "unauthorized", "code": 16, "message": "unauthorized"})
        else:
            self.write(self.workbench.answer())


@contextlib.asynccontextmanager
async def workbench() -> AsyncIterator[Workbench]:
    """Serve a workbench's API v2, and let this process run in its project of the user."""
    stand_in = Workbench()
    server = HTTPServer(Application([("/api/v2/usersquota", _Handler, {"workbench": stand_in})]))
    socket, port = bind_unused_port()
    server.add_socket(socket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDSW_APIV2_KEY", KEY)
        patch.setenv("CDSW_DOMAIN", f"127.0.0.1:{port}")
        patch.setenv("CDSW_PROJECT_URL", f"http://127.0.0.1:{port}/api/v1/projects/{USER}/demo")
        patch.setenv("CDSW_CREATOR", USER)
        try:
            yield stand_in
        finally:
            server.stop()
            await server.close_all_connections()


# -- how it may misbehave


def quota(
    user: str = USER, most: Sequence[object] = ("64", "256", "0"), used: Sequence[object] = ("52", "16", "0")
) -> dict[str, Any]:
    names = ("cpu", "memory", "nvidia_gpu")
    return {
        "user": {"id": 5, "user_name": user, "name": user.title()},
        "quota_configured": dict(zip(names, most, strict=True)),
        "quota_usage": dict(zip(names, used, strict=True)),
    }


async def never_answers(handler: RequestHandler) -> None:
    await asyncio.sleep(3600)


async def shows_a_page(handler: RequestHandler) -> None:
    handler.write("<!DOCTYPE html><title>Sign in</title>")


async def redirects(handler: RequestHandler) -> None:
    handler.redirect("/api/v2/usersquota?again")


async def closes_the_connection(handler: RequestHandler) -> None:
    handler.request.connection.stream.close()  # type: ignore[attr-defined]


def refuses(code: int) -> Callable[[RequestHandler], Any]:
    async def refuse(handler: RequestHandler) -> None:
        handler.set_status(code)
        handler.write({"message": "no"})

    return refuse


def writes(text: str) -> Callable[[RequestHandler], Any]:
    async def write(handler: RequestHandler) -> None:
        handler.write(text)

    return write
