"""Imports point down: nobody needs to know what stands above to understand a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import dask_cml

PACKAGE = Path(dask_cml.__file__).parent
#: A module imports from its own layer or from a lower one, which stands further down.
LAYERS = (
    ("cli", "serve", "discovery", "doctor", "jupyter", "dask_utils", "address"),
    ("observers",),
    ("cluster",),
    ("manager",),
    ("display", "records", "scheduler"),
    ("dashboard", "sessions", "worker"),
    ("options",),
    ("local", "private_files"),
    (
        "cancellation",
        "checks",
        "errors",
        "identity",
        "layout",
        "msgpack_comm",
        "naming",
        "protocol",
        "validation",
        "words",
        "wrapper",
    ),
)
#: Those of one layer that know nothing of each other.
APART = (
    {"display", "records", "scheduler"},
    {"dashboard", "sessions", "worker"},
)
#: What runs in every worker session, whose memory is the tasks', with all that it imports.
ALONE = {
    "wrapper": set(),
    "worker": {"layout", "protocol"},
}
MOST_LINES = {"cluster.py": 900}


def part(module: str) -> str:
    """Return a module's place in the layers: its folder, or itself."""
    return module.split(".")[1]


def layer(name: str) -> int:
    [found] = [i for i, names in enumerate(LAYERS) if name in names]
    return found


def imports() -> Iterator[tuple[str, str]]:
    """Yield which module imports which, also for types alone."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(["dask_cml", *path.relative_to(PACKAGE).with_suffix("").parts])
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "dask_cml":
                    yield from ((module, f"dask_cml.{each.name}") for each in node.names)
                elif node.module.startswith("dask_cml."):
                    yield module, node.module


def test_every_module_has_a_layer():
    parts = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert parts - {"__init__"} == {name for names in LAYERS for name in names}


def test_imports_point_down():
    up = [
        f"{importer} imports {imported}"
        for importer, imported in imports()
        if importer != "dask_cml.__init__"
        and part(imported) in {name for names in LAYERS for name in names}
        and (
            layer(part(imported)) < layer(part(importer))
            or any(
                part(importer) != part(imported) and {part(importer), part(imported)} <= each
                for each in APART
            )
        )
    ]
    assert up == []


def test_no_modules_import_each_other():
    below = {}
    for importer, imported in imports():
        below.setdefault(importer, set()).add(imported)
    TopologicalSorter(below).prepare()  # a CycleError names the circle


def test_the_code_in_sessions_imports_little():
    used = {name: set() for name in ALONE}
    for importer, imported in imports():
        if part(importer) in ALONE and part(imported) != part(importer):
            used[part(importer)].add(part(imported))
    assert used == ALONE


def test_modules_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: n for path, n in lengths.items() if n > MOST_LINES.get(path.name, 400)} == {}


def test_folders_are_small():
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    assert {folder.name: n for folder in folders if (n := len([*folder.glob("[!_]*.py")])) > 20} == {}
