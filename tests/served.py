"""A real ``dask cml serve``, for tests in a browser and for the documentation's pictures."""

import http.client
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab import PATIENCE, ServerProcess, until
from ports import free_port

_LINK = re.compile(r"https://\S+|http://127\.0\.0\.1:\d+/(?:\?token=\S+)?")
TOKEN = "correct-horse-battery"


class PageServer(ServerProcess):
    """The web UI as a process. In a CML session, CML names its users, and serves a second port."""

    def __init__(
        self,
        folder: Path,
        session: str | None = None,
        variables: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        descriptors: int | None = None,
    ) -> None:
        self.log_file = folder / "serve.log"
        self._command = [sys.executable, "-u", "-m", "dask", "cml", "serve", *arguments]
        if descriptors is not None:
            self._command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *self._command]
        self._environment = {**os.environ, "DASK_CML__PLATFORM": "local", "DASK_CML_SERVE_TOKEN": TOKEN}
        for name in ("CDSW_ENGINE_ID", "CDSW_APP_PORT", "CDSW_READONLY_PORT"):
            self._environment.pop(name, None)
        self.dashboard_port = free_port()
        if session is not None:
            ports = {"CDSW_APP_PORT": str(free_port()), "CDSW_READONLY_PORT": str(self.dashboard_port)}
            self._environment.update(ports, CDSW_ENGINE_ID=session, CDSW_DOMAIN="ml.test")
        self._environment.update(variables or {})

    def _wait(self) -> None:
        until(lambda: _LINK.search(self.log) or self.process.poll() is not None)
        #: As the command prints it, with the token. In a CML session, what CML's link leads to.
        self.link = _LINK.search(self.log)[0]
        if self.link.startswith("https:"):
            self.link = f"http://127.0.0.1:{self._environment['CDSW_APP_PORT']}/"
        self.url = self.link.partition("?")[0]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"/{path}", data, {"Authorization": f"Bearer {TOKEN}", **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    @property
    def clusters(self) -> dict[str, dict[str, Any]]:
        status, found = self.ask("GET", "api/clusters")
        assert status == 200, found
        return {cluster["name"]: cluster for cluster in found["clusters"]}

    def create(self, name: str, **options: Any) -> None:
        status, found = self.ask("POST", "api/clusters", {"name": name, **options})
        assert status in (201, 202), found
        self.until_runs(name, options.get("n_workers", 0))

    def until_runs(self, name: str, n: int) -> None:
        def runs() -> bool:
            found = self.clusters.get(name, {})
            assert found.get("status") != "failed", found
            return found.get("status") == "running" and found["n_workers"] == found["n_arrived"] == n

        until(runs)
