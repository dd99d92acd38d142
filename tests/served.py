"""A real ``dask cml serve``, for tests in a browser and for the documentation's pictures."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab import PATIENCE, until

_LINK = re.compile(r"http://127\.0\.0\.1:\d+/(?:\?token=\S+)?")
TOKEN = "correct-horse-battery"


class PageServer:
    """The page as a process. Leaving the ``with`` block ends it as SIGTERM does.

    Parameters
    ----------
    folder : Path
        Where its log is.
    session : str, optional
        The id of the CML session that it is to run in. There it knows users by the headers of the platform's
        entry, and has no token.
    variables : mapping of str to str, optional
        More environment variables.
    """

    def __init__(
        self, folder: Path, session: str | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log_file = folder / "serve.log"
        self._environment = {**os.environ, "DASK_CML__PLATFORM": "local", "DASK_CML_SERVE_TOKEN": TOKEN}
        for name in ("CDSW_ENGINE_ID", "CDSW_APP_PORT", "CDSW_READONLY_PORT"):
            self._environment.pop(name, None)
        if session is not None:
            self._environment.update(CDSW_ENGINE_ID=session, CDSW_APP_PORT=str(_free_port()))
        self._environment.update(variables or {})

    def __enter__(self) -> PageServer:
        command = [sys.executable, "-u", "-m", "dask", "cml", "serve"]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            until(lambda: _LINK.search(self.log) or self.process.poll() is not None)
            assert self.process.poll() is None
        except BaseException:
            self.process.kill()
            self.process.wait()
            print(self.log)
            raise
        #: As the command prints it, with the token.
        self.link = _LINK.search(self.log)[0]
        self.url = self.link.partition("?")[0]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it as a platform or a user does, and wait for it."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError("the page did not end: " + self.log) from None

    @property
    def log(self) -> str:
        """What it has written."""
        return self.log_file.read_text()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Make a request with the token; return the answer's status and what it says, JSON parsed."""
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
        """What the page lists, by name."""
        status, found = self.ask("GET", "api/clusters")
        assert status == 200, found
        return {each["name"]: each for each in found["clusters"]}

    def create(self, name: str, **options: Any) -> None:
        """Create a cluster, and wait for its workers."""
        status, found = self.ask("POST", "api/clusters", {"name": name, **options})
        assert status in (201, 202), found
        self.until_runs(name, options.get("n_workers", 0))

    def until_runs(self, name: str, n: int) -> None:
        """Wait until a cluster runs with n workers and no others."""

        def runs() -> bool:
            found = self.clusters.get(name, {})
            assert found.get("status") != "failed", found
            return found.get("status") == "running" and found["n_workers"] == found["n_arrived"] == n

        until(runs)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
