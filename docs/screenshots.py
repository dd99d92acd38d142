"""Take the pictures of JupyterLab and of the web UI in docs/images, of the real things on the local platform.

Phones show the pictures whose names end in ``-narrow``.

Run ``python docs/screenshots.py`` with what the tests need, and with Chromium. With the argument ``lab`` or
``web`` it takes those pictures alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dask

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import testbed  # noqa: E402
from distributed import Client  # noqa: E402
from lab import JupyterServer, Page, Pane, browser, until  # noqa: E402
from served import PageServer  # noqa: E402

IMAGES = HERE / "images"
MAKE = """\
from dask.distributed import Client
from dask_cml import CMLCluster

cluster = CMLCluster(
    name="night", n_workers=3,
    cpu=2, memory=4
)
client = Client(cluster)"""
WORK = """\
import dask.array as da

x = da.random.random(
    (12_000, 12_000),
    chunks=(1_000, 2_000)
)
y = (x + x.T).persist()
y.std(axis=0).mean().compute()"""
#: Widths of the web UI's pages: one that is readable in the documentation, and a phone's.
WIDTH = 960
NARROW = 400
LIVE = ("scheduling", "starting", "running")
#: The steps of the work on the web UI's cluster, and how many seconds each takes.
STEPS = {"load": 0.3, "clean": 0.1, "features": 0.5, "fit": 0.8, "score": 0.2}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cml-") as folder, browser() as chrome:
        os.environ["DASK_CML_LOCAL_DIRECTORY"] = f"{folder}/local"
        os.environ["DASK_CML__STATE_DIRECTORY"] = f"{folder}/state"
        dask.config.refresh()
        testbed.set_up(Path(folder, "local"))
        chosen = sys.argv[1:] or ["lab", "web"]
        if "lab" in chosen:
            take_lab(chrome, Path(folder, "jupyter"))
        if "web" in chosen:
            with PageServer(Path(folder), variables={"CDSW_CREATOR": "alice"}) as server:
                take_web_ui(chrome, server)
        # The folder must not be removed under sessions that end.
        until(lambda: not live_sessions())


def live_sessions() -> list[Any]:
    """Sessions that run or are to run."""
    return [session for session in testbed.list_workers() if session["status"] in LIVE]


def take_lab(chrome: Any, folder: Path) -> None:
    with JupyterServer(folder, {}, module="jupyterlab") as server:
        # Small, so that the text is readable where the documentation shows the pictures.
        context = chrome.new_context(viewport={"width": 1100, "height": 700}, device_scale_factor=1.5)
        lab = Page(context.new_page(), server)
        take_sidebar(lab)
        take_widget(lab)


def take_web_ui(chrome: Any, server: PageServer) -> None:
    large = {"n-workers": 1, "cpu": 4, "memory": 16}
    options = {
        "name": "churn-model",
        "n_workers": 2,
        "cpu": 2,
        "memory": 8,
        "worker_groups": {"large": large},
    }
    assert server.ask("POST", "api/clusters", options)[0] in (201, 202)
    server.until_runs("churn-model", 3)
    create = ["cml", "create", "--name", "sweep", "--n-workers", "4", "--platform", "local"]
    environment = {**os.environ, "CDSW_CREATOR": "bob"}
    subprocess.run([sys.executable, "-m", "dask", *create], env=environment, check=True)
    # There is room for the third scheduler and for one of its two workers.
    used = sum(session["cpu"] for session in live_sessions())
    testbed.configure(quota={"cpu": used + 5}, over_quota="wait")
    options = {"name": "forecast", "n_workers": 2, "cpu": 4, "memory": 16}
    assert server.ask("POST", "api/clusters", options)[0] in (201, 202)
    with Client("cml://churn-model") as client:
        running = start_work(client)
        running[100].result()
        limits = {"minimum": 1, "maximum": 2}
        assert server.ask("POST", "api/clusters/churn-model/adapt", limits)[0] == 200
        page = chrome.new_context(
            viewport={"width": WIDTH, "height": 350}, device_scale_factor=1.5
        ).new_page()
        page.set_default_timeout(120_000)
        page.goto(server.link)
        forecast = page.locator("tbody", has_text="forecast")
        forecast.filter(has_text="1 queued").filter(has_text="1 of 2").wait_for()
        page.locator("tbody", has_text="sweep").filter(has_text="running, idle").wait_for()
        page.screenshot(path=IMAGES / "serve-list.png")
        page.set_viewport_size({"width": NARROW, "height": 350})
        page.screenshot(path=IMAGES / "serve-list-narrow.png", full_page=True)
        page.set_viewport_size({"width": WIDTH, "height": 1600})
        page.get_by_role("link", name="churn-model").click()
        page.locator("#dashboard summary").click()
        stream = Pane(page.frame_locator("#view iframe"))
        until(lambda: stream.coloured > 50_000)
        page.mouse.move(0, 0)
        box = page.locator("#dashboard").bounding_box()
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 24}
        page.screenshot(path=IMAGES / "serve-cluster.png", clip=clip)
        page.set_viewport_size({"width": NARROW, "height": 1600})
        sessions = page.get_by_role("heading", name="Sessions").bounding_box()
        clip = {"x": 0, "y": 0, "width": NARROW, "height": sessions["y"] - 8}
        page.screenshot(path=IMAGES / "serve-cluster-narrow.png", clip=clip)
        del running
    assert server.ask("DELETE", "api/clusters/sweep")[0] == 200


def start_work(client: Client) -> list[Any]:
    """Submit steps of all kinds by turns."""
    return [
        client.submit(time.sleep, seconds * (0.5 + n % 7 / 7), key=f"{name}-{n}", pure=False)
        for n in range(400)
        for name, seconds in STEPS.items()
    ]


def take_sidebar(lab: Page) -> None:
    lab.open()
    lab.open_notebook("night.ipynb", MAKE)
    lab.run_cells()
    item = lab.item("night")
    item.filter(has_text="Number of Workers: 3").wait_for()
    item.click()
    stream = lab.open_layout("Task Stream")
    until(lambda: stream.drawn)
    # The others are too narrow for their texts.
    for title in ("Workers Memory", "Progress"):
        tab = lab.page.locator("#jp-main-dock-panel li.lm-TabBar-tab", has_text=title)
        tab.locator(".lm-TabBar-tabCloseIcon").click()
    lab.run_new_cell(WORK)
    lab.notebook.locator(".jp-OutputArea-executeResult").wait_for()
    until(lambda: stream.coloured > 1000)
    lab.page.mouse.move(0, 0)
    lab.page.screenshot(path=IMAGES / "sidebar.png")
    clusters = lab.page.locator(".dask-DaskClusterManager")
    widen(lab, clusters.bounding_box(), by=80)
    box, last = clusters.bounding_box(), item.bounding_box()
    height = last["y"] + last["height"] - box["y"]
    lab.page.screenshot(path=IMAGES / "sidebar-narrow.png", clip={**box, "height": height})


def widen(lab: Page, box: dict[str, float], by: int) -> None:
    """Draw the sidebar's right edge to the right."""
    mouse, x, y = lab.page.mouse, box["x"] + box["width"] + 2, box["y"] + 20
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + by, y, steps=4)
    mouse.up()


def take_widget(lab: Page) -> None:
    lab.open_notebook("widget.ipynb", MAKE.replace("night", "dawn"), "cluster")
    lab.run_cells()
    cells = lab.notebook.locator(".jp-Cell")
    cells.last.filter(has_text="Workers: 3").wait_for()
    cells.last.get_by_role("tab", name="Sessions").click()
    cells.last.locator("td", has_text="connected").nth(2).wait_for()
    lab.page.mouse.move(0, 0)
    box = cells.last.locator(".widget-tab").bounding_box()
    lab.page.screenshot(path=IMAGES / "widget.png", clip=box)
    next_column = cells.last.locator("th", has_text="Launched").bounding_box()
    clip = {**box, "width": next_column["x"] - box["x"]}
    lab.page.screenshot(path=IMAGES / "widget-narrow.png", clip=clip)


if __name__ == "__main__":
    main()
