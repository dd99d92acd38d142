"""The pictures of JupyterLab in docs/images: python docs/screenshots.py.

It needs what the tests need, with Chromium, and takes the pictures from the real thing on the local platform.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from lab import JupyterServer, Page, browser  # noqa: E402

IMAGES = HERE / "images"
FACTORY = {"n-workers": 3, "cpu": 2, "memory": 8, "forward-dashboard": True}
CELLS = [
    "from dask.distributed import Client\n"
    "from dask_cml import CMLCluster\n\n"
    'cluster = CMLCluster(name="night", n_workers=3, cpu=2, memory=8)\n'
    "client = Client(cluster)",
    "import dask.array as da\n\n"
    "x = da.random.random((20_000, 20_000), chunks=(1_000, 2_000))\n"
    "(x + x.T).std(axis=0).mean().compute()",
    "cluster",
]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cml-") as folder:
        os.environ["DASK_CML_LOCAL_DIRECTORY"] = f"{folder}/local"
        os.environ["DASK_CML__STATE_DIRECTORY"] = f"{folder}/state"
        Path(folder, "local").mkdir(mode=0o700)
        with (
            JupyterServer(Path(folder, "jupyter"), FACTORY, module="jupyterlab") as server,
            browser() as chrome,
        ):
            context = chrome.new_context(viewport={"width": 1280, "height": 800})
            lab = Page(context.new_page(), server, notebook="night.ipynb", cells=CELLS)
            lab.run_cells()
            item = lab.item("night")
            item.filter(has_text="Number of Workers: 3").wait_for()
            lab.page.screenshot(path=IMAGES / "sidebar.png")


if __name__ == "__main__":
    main()
