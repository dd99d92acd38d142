"""A real Jupyter server with dask-labextension, and a real Chromium: for tests, and for the documentation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import yaml

if TYPE_CHECKING:
    from typing_extensions import Self

#: Seconds for what takes a few on a quiet machine.
PATIENCE = 120.0
_CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "checkForUpdates": False,
        "doNotDisturbMode": True,
        "fetchNews": "false",
    },
}


#: JupyterLab gives its themes a second and a half to load. On a busy machine it complains, and goes on.
_OF_THEMES = "Error Loading Theme"


class ServerProcess:
    """A server as a process with a log. Leaving the ``with`` block ends it as SIGTERM does."""

    log_file: Path
    _command: list[str]
    _environment: dict[str, str]

    def __enter__(self) -> Self:
        with self.log_file.open("w") as log:
            # After a crash, its log shows where each of its threads was.
            environment = {**self._environment, "PYTHONFAULTHANDLER": "1"}
            self.process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            self._wait()
            assert self.process.poll() is None
        except BaseException:
            self.process.kill()
            self.process.wait()
            print(self.log)
            raise
        return self

    def _wait(self) -> None:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(f"{type(self).__name__} did not end: {self.log}") from None

    @property
    def log(self) -> str:
        status = self.process.poll()
        return self.log_file.read_text() + ("" if status is None else f"[exit status {status}]\n")


class JupyterServer(ServerProcess):
    """A Jupyter server with a configuration of its own, whose sidebar creates clusters with ``factory``."""

    def __init__(
        self,
        folder: Path,
        factory: Mapping[str, Any],
        more: Mapping[str, Any] | None = None,
        module: str = "jupyter_server",
        arguments: Sequence[str] = (),
    ) -> None:
        self.notebooks = folder / "notebooks"
        self.log_file = folder / "jupyter.log"
        self._command = [sys.executable, "-m", module, *_ARGUMENTS, *arguments]
        self._command.append(f"--ServerApp.root_dir={self.notebooks}")
        self._runtime = folder / "runtime"
        places = {
            "IPYTHONDIR": folder / "ipython",
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": self._runtime,
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
            "DASK_CONFIG": folder / "dask",
        }
        for path in (self.notebooks, *places.values()):
            path.mkdir(exist_ok=True, parents=True)
        for name, setting in _SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(json.dumps(setting))
        made_by = {"module": "dask_cml", "class": "CMLCluster", "args": [], "kwargs": dict(factory)}
        configuration = {"labextension": {"factory": made_by, **(more or {})}}
        (folder / "dask" / "labextension.yaml").write_text(yaml.safe_dump(configuration))
        self._environment = {
            **os.environ,
            **{name: str(path) for name, path in places.items()},
            "DASK_CML__PLATFORM": "local",
            "JUPYTER_PREFER_ENV_PATH": "1",
        }
        self._environment.pop("CDSW_ENGINE_ID", None)

    def _wait(self) -> None:
        until(lambda: self._information() or self.process.poll() is not None)
        self.url = self._information()["url"].replace("localhost", "127.0.0.1")
        until(lambda: self.answers("api") or self.process.poll() is not None)
        assert self.answers("api")

    def _information(self) -> dict[str, Any]:
        try:
            return json.loads((self._runtime / f"jpserver-{self.process.pid}.json").read_text())
        except (OSError, ValueError):
            return {}

    def answers(self, path: str) -> bool:
        try:
            return self.request("GET", path)[0] < 400
        except OSError:
            return False

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    @property
    def clusters(self) -> dict[str, dict[str, Any]]:
        status, models = self.request("GET", "dask/clusters")
        assert status == 200, models
        assert len({model["name"] for model in models}) == len(models)
        return {model["name"]: model for model in models}


_ARGUMENTS = (
    "--allow-root",
    "--no-browser",
    "--ServerApp.port=0",
    "--ServerApp.disable_check_xsrf=True",
    "--IdentityProvider.token=",
    "--SidebarExtension.interval=0.3",
)


def until(condition: Callable[[], object], seconds: float = PATIENCE, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(pause)


def chromium() -> str | None:
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next(filter(None, found), None)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": chromium(), "args": [*_CHROMIUM], "timeout": PATIENCE * 1000}
        running = playwright.chromium.launch(**options)
        try:
            yield running
        finally:
            running.close()


class Page:
    """JupyterLab in a browser, with the sidebar open."""

    def __init__(self, page: Any, server: JupyterServer) -> None:
        self.page = page
        self._server = server
        page.set_default_timeout(PATIENCE * 1000)
        page.add_locator_handler(
            page.locator(".jp-Dialog", has_text=_OF_THEMES),
            lambda dialog: dialog.locator("button.jp-mod-accept").click(),
        )

    def open(self, path: str = "") -> None:
        self.page.goto(f"{self._server.url}lab{path}?reset")
        self.page.locator("#jp-main-dock-panel").wait_for()
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        tab = self.page.locator('li.lm-TabBar-tab[data-id="dask-dashboard-launcher"]')
        tab.wait_for()
        if "lm-mod-current" not in (tab.get_attribute("class") or ""):
            tab.click()
        self.new_button.wait_for()

    def open_notebook(self, name: str, *cells: str) -> None:
        content = nbformat.v4.new_notebook()
        content.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        content.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(content, self._server.notebooks / name)
        self.open(f"/tree/{name}")
        until(lambda: self._is_connected(name))
        self.notebook.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()

    def _is_connected(self, notebook: str) -> bool:
        sessions = self._server.request("GET", "api/sessions")[1]
        kernels = [session["kernel"] for session in sessions if session["path"] == notebook]
        return any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in kernels)

    @property
    def new_button(self) -> Any:
        return self.page.locator('.dask-DaskClusterManager [data-command="dask:launch-cluster"]')

    def item(self, name: str | re.Pattern) -> Any:
        title = self.page.locator(".dask-ClusterListingItem-title", has_text=name)
        return self.page.locator("li.dask-ClusterListingItem").filter(has=title)

    def lists(self, item: Any, text: str = "") -> None:
        self._refresh_until(lambda: item.filter(has_text=text).count() == 1)

    def lists_no(self, item: Any) -> None:
        self._refresh_until(lambda: item.count() == 0)
        assert self.dialog.count() == 0

    def _refresh_until(self, condition: Callable[[], bool]) -> None:
        # By itself the list is refreshed every 5 s.
        button = self.page.locator(".dask-DaskClusterManager").get_by_title("Refresh Cluster List")
        until(lambda: condition() or button.click(), pause=0.3)

    @property
    def dialog(self) -> Any:
        return self.page.locator(".jp-Dialog").filter(has_not_text=_OF_THEMES)

    def scale(self, item: Any, n: int) -> None:
        self._scale(item, False, (0, n))

    def adapt(self, item: Any, minimum: int, maximum: int) -> None:
        self._scale(item, True, (2, maximum), (1, minimum), (2, maximum))

    def _scale(self, item: Any, adapts: bool, *numbers: tuple[int, int]) -> None:
        item.locator(".dask-ClusterListingItem-scale").click()
        checkbox = self.dialog.locator("input.dask-ScalingCheckbox")
        if checkbox.is_checked() is not adapts:
            checkbox.click()
        for i, number in numbers:
            self.dialog.locator("input.dask-ScalingInput").nth(i).fill(str(number))
        self.dialog.locator("button.jp-mod-accept").click()
        self.dialog.wait_for(state="detached")

    def shut_down(self, item: Any) -> None:
        item.locator(".dask-ClusterListingItem-stop").click()

    def insert_client_code(self, item: Any) -> None:
        item.locator(".dask-ClusterListingItem-code").click()

    def show(self, title: str) -> None:
        self.page.locator("#jp-main-dock-panel li.lm-TabBar-tab", has_text=title).click()

    @property
    def notebook(self) -> Any:
        return self.page.locator(".jp-NotebookPanel")

    def run_cells(self) -> None:
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def run_new_cell(self, code: str) -> None:
        self.notebook.locator(".jp-Cell").last.click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Control+Enter")

    def open_pane(self, title: str) -> Pane:
        self.page.locator(f'.dask-DashboardListing-item button[value="{title}"]').click()
        return self._pane(title)

    def open_layout(self, title: str) -> Pane:
        self.page.get_by_role("menuitem", name="File", exact=True).click()
        self.page.get_by_role("menuitem", name="Launch Dask Dashboard Layout").click()
        return self._pane(title)

    def _pane(self, title: str) -> Pane:
        route = f"individual-{title.lower().replace(' ', '-')}"
        return Pane(self.page.frame_locator(f'.dask-DaskDashboard-widget iframe[src*="{route}"]'))


@contextmanager
def pictured(request: Any, folder: Path, server: ServerProcess) -> Iterator[list[Any]]:
    contexts: list[Any] = []
    failed_before = request.session.testsfailed
    yield contexts
    failed = request.session.testsfailed > failed_before
    for n, context in enumerate(contexts):
        for page in context.pages if failed else ():
            path = folder / f"{n}.png"
            page.screenshot(path=path)
            print(f"{path} shows:\n{page.inner_text('body')}")
        context.close()
    if failed:
        print(server.log)


class Pane:
    def __init__(self, frame: Any) -> None:
        self._canvases = frame.locator(".bk-Canvas canvas")
        #: Of the cluster's map, which is no canvas.
        self.workers = frame.locator('#vis [id^="worker-"]')

    @property
    def drawn(self) -> int:
        return self._count(0)

    @property
    def coloured(self) -> int:
        """How many of its pixels have a colour, as data have; axes and titles are grey."""
        return self._count(40)

    def _count(self, saturation: int) -> int:
        from playwright.sync_api import Error

        try:
            return sum(self._canvases.evaluate_all(_COUNT, saturation))
        except Error:  # the document is being loaded
            return 0


_COUNT = """
(canvases, saturation) => canvases.filter(canvas => canvas.width && canvas.height).map(canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let n = 0;
    for (let i = 0; i < pixels.length; i += 4) {
        const [least, , most] = [pixels[i], pixels[i + 1], pixels[i + 2]].sort((a, b) => a - b);
        if (pixels[i + 3] > 0 && least < 250 && most - least >= saturation) n += 1;
    }
    return n;
})
"""
