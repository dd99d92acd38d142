"""Take the pictures of JupyterLab in docs/images, of the real thing on the local platform.

Run ``python docs/screenshots.py`` with what the tests need, and with Chromium.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from lab import JupyterServer, Page, browser, until  # noqa: E402

IMAGES = HERE / "images"
FACTORY = {"n-workers": 2, "cpu": 2, "memory": 8, "forward-dashboard": True}
MAKE = """\
from dask.distributed import Client
from dask_cml import CMLCluster

cluster = CMLCluster(
    name="night", n_workers=3, cpu=2, memory=8
)
client = Client(cluster)"""
WORK = """\
import dask.array as da

x = da.random.random(
    (12_000, 12_000), chunks=(1_000, 2_000)
)
y = (x + x.T).persist()
y.std(axis=0).mean().compute()"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cml-") as folder:
        os.environ["DASK_CML_LOCAL_DIRECTORY"] = f"{folder}/local"
        os.environ["DASK_CML__STATE_DIRECTORY"] = f"{folder}/state"
        Path(folder, "local").mkdir(mode=0o700)
        server = JupyterServer(Path(folder, "jupyter"), FACTORY, module="jupyterlab")
        with server, browser() as chrome:
            context = chrome.new_context(viewport={"width": 1440, "height": 860})
            lab = Page(context.new_page(), server)
            take_sidebar(lab)
            take_widget(lab)


def take_sidebar(lab: Page) -> None:
    lab.open()
    lab.new_button.click()
    lab.item("CMLCluster 1").wait_for()
    lab.open_notebook("night.ipynb", MAKE)
    lab.run_cells()
    item = lab.item("night")
    item.filter(has_text="Number of Workers: 3").wait_for()
    item.click()
    stream = lab.open_layout("Task Stream")
    until(lambda: stream.drawn)
    lab.run_new_cell(WORK)
    lab.notebook.locator(".jp-OutputArea-executeResult").wait_for()
    until(lambda: stream.coloured > 1000)
    lab.page.screenshot(path=IMAGES / "sidebar.png")


def take_widget(lab: Page) -> None:
    lab.open_notebook("widget.ipynb", MAKE.replace("night", "day"), "cluster")
    lab.run_cells()
    cells = lab.notebook.locator(".jp-Cell")
    sessions = cells.last.locator("summary", has_text="Sessions: 4")
    cells.last.filter(has_text="Workers: 3").wait_for()
    sessions.click()
    lab.page.mouse.move(0, 0)
    first, last = cells.first.bounding_box(), cells.last.bounding_box()
    height = last["y"] + last["height"] - first["y"]
    lab.page.screenshot(path=IMAGES / "widget.png", clip={**first, "height": height})


if __name__ == "__main__":
    main()
