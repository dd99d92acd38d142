"""The web UI in the event loop of a test, also in the simulated world, and a client of its API."""

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from clusters import create_and_leave
from simulated.testing import simulated
from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from dask_cml.dashboard.http_server import LocalServer, local_socket
from dask_cml.serve.access import Access
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.serve.servers import Dashboards, make_application


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Server:
    clusters: ProjectClusters
    access: Access
    dashboards: Dashboards

    async def request(
        self, method: str, path: str, body: object = None, *, raw=None, token=True, port=None, **headers
    ) -> Answer:
        if token:
            headers["Authorization"] = f"Bearer {self.access.token}"
        request = HTTPRequest(
            f"http://127.0.0.1:{port or self.access.port}{path}",
            method=method,
            headers=headers,
            body=raw if body is None else json.dumps(body),
            allow_nonstandard_methods=True,
            follow_redirects=False,
        )
        answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        assert answer.code != 599, answer.error
        return Answer(answer.code, answer.headers, answer.body.decode())

    async def get(self, path: str, **headers) -> Any:
        answer = await self.request("GET", path, **headers)
        assert answer.status == 200, answer
        return answer.json

    async def post(self, path: str, **body) -> Answer:
        return await self.request("POST", path, body)

    async def cluster(self, name: str) -> Any:
        clusters = (await self.get("/api/clusters"))["clusters"]
        [found] = [cluster for cluster in clusters if cluster["name"] == name]
        return found

    async def until(self, name: str, condition) -> Any:
        async def look() -> Any:
            found = [cluster for cluster in self.clusters.describe() if cluster["name"] == name]
            return found[0] if found and condition(found[0]) else None

        return await first_result(look)


async def first_result(look: Callable[[], Awaitable[Any]]) -> Any:
    async def wait() -> Any:
        while not (result := await look()):
            await asyncio.sleep(0.02)
        return result

    return await asyncio.wait_for(wait(), 120)


@contextlib.asynccontextmanager
async def serving():
    listener = local_socket(0)
    access, clusters = Access(listener.getsockname()[1]), ProjectClusters(interval=0.1)
    dashboards = Dashboards(clusters, access)
    http = LocalServer(make_application(clusters, access, dashboards), listener)
    clusters.start()
    try:
        yield Server(clusters, access, dashboards)
    finally:
        await http.close()
        await dashboards.close()
        await clusters.close()


def on_page(test):
    wanted = inspect.signature(test).parameters

    @functools.wraps(test)
    async def run(it, **arguments):
        async with serving() as server:
            given = {"server": server, **({"it": it} if "it" in wanted else {})}
            await test(**given, **arguments)

    own = [parameter for name, parameter in wanted.items() if name not in ("it", "server")]
    run.__signature__ = inspect.Signature(
        [inspect.Parameter("it", inspect.Parameter.POSITIONAL_OR_KEYWORD), *own]
    )
    return simulated(run)


def leave(name, **options):
    return create_and_leave(name=name, platform=None, **options)


def running(cluster):
    return cluster["status"] == "running" and cluster["n_arrived"] == cluster["n_workers"]
