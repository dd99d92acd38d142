"""Install dask-cml from this clone for all sessions of the project, without changing the runtime image.

CML runs this script in IPython, in the project's root: there is no ``__file__``, and ``sys.exit(0)`` is an
error.
"""

import os
import site
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

IMAGES = Path(".ci/images")


def main():
    image = packages_of_the_image()
    editor = "jupyterlab" if "jupyterlab" in image else "workbench"
    # In an image without JupyterLab, the extra `jupyter` would install one into the home folder.
    extras = "dashboard,jupyter" if editor == "jupyterlab" else "dashboard"
    path = IMAGES / f"py{sys.version_info[0]}{sys.version_info[1]}-{editor}.txt"
    with tempfile.TemporaryDirectory() as folder:
        if not path.exists():
            print(f"{path} does not exist. The constraints are the packages of this image.", flush=True)
            path = constraints_of(image, folder)
        elif changed := changes(path, image):
            print(f"This image has other packages than {path} lists: {', '.join(changed)}.")
            print("The constraints are the packages of this image.", flush=True)
            path = constraints_of(image, folder)
        else:
            print(f"The constraints are those of {path}.", flush=True)
        # Editable, so that notebooks in all folders import this clone, as sessions in its root do. pip's
        # configuration in the image has it install into the home folder.
        command = [sys.executable, "-m", "pip", "install", "-c", str(path), "-e", f".[{extras}]"]
        return subprocess.run(command).returncode


def packages_of_the_image():
    """Return the versions of the packages by name, but for those in the home folder and in this clone."""
    others = {os.path.realpath(path) for path in (site.getusersitepackages(), os.getcwd(), "cml")}
    path = [each for each in sys.path if os.path.realpath(each) not in others]
    found = {}
    for each in metadata.distributions(path=path):
        about = each.metadata or {}  # nothing is there if pip was interrupted
        if about.get("Name") and about.get("Version"):
            found.setdefault(normalized(about["Name"]), about["Version"])
    found.pop("dask-cml", None)  # of a custom image; this clone takes its place
    return found


def changes(path, image):
    """Return in words where the image differs from a file of constraints."""
    pins = dict(line.strip().split("==") for line in path.read_text().splitlines() if "==" in line)
    pins = {normalized(name): version for name, version in pins.items()}
    return [
        f"{name} {image[name]} instead of {version}"
        for name, version in pins.items()
        if image.get(name, version) != version
    ]


def constraints_of(image, folder):
    """Write constraints that keep what the image has, and return their path."""
    path = Path(folder) / "constraints.txt"
    path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(image.items())))
    return path


def normalized(name):
    return name.lower().replace("_", "-").replace(".", "-")


if status := main():
    sys.exit(status)
