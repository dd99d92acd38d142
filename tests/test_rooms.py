"""The rooms of the package: the core, sharing above it, and the surfaces above both. Imports point down only.

Imports for type checking and imports inside of functions count, too.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from distributed import SpecCluster

import dask_cml
from dask_cml import CMLCluster

ROOT = Path(dask_cml.__file__).parent
#: The packages and modules of each room but the lowest, the core, which has all others.
ROOMS = {
    "surfaces": {"cli", "serve", "doctor", "jupyter", "observers", "discovery", "dask_utils"},
    "sharing": {"sharing", "records", "scheduler", "dashboard", "address"},
}
ORDER = ["core", *reversed(ROOMS)]
#: The one import that points up: ``CMLCluster._share`` attaches sharing to a cluster.
ATTACHES = ("dask_cml.cluster", "dask_cml.sharing.sharing")
#: The most methods of a class. This number may only become smaller.
MOST_METHODS = 62
#: The most modules and lines of code that ``import dask_cml.cluster`` loads, without comments and docstrings.
#: They may only become smaller, but for mended faults and checks that must run before anything is launched.
MOST_MODULES, MOST_LINES = 47, 5932

TESTS = Path(__file__).parent
#: Members of a cluster that other code may replace at any time. Tests see them by functions of clusters.py.
INTERNAL = {"sharing", "processes", "losses", "retirements", "connection"}
INTERNAL |= {"ending", "demand", "place", "view", "outbox", "failover", "groups", "api", "link", "messages"}
#: How the names end that tests give to clusters.
CLUSTERS = ("cluster", "remote", "keeper", "creator", "follower", "former", "other", "first", "mine", "user")

FILES = {
    ".".join(("dask_cml", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


@lru_cache(None)
def tree_of(module):
    return ast.parse(FILES[module].read_text())


def imports(module, *, inner=True):
    """Return the modules of the package that a module imports, in functions only if `inner` is True."""
    found, nodes = set(), [*tree_of(module).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in FILES else node.module for name in names)
        elif inner or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return (found & FILES.keys()) - {module}


def room_of(module):
    part = module.split(".")[1]
    return next((room for room, parts in ROOMS.items() if part in parts), "core")


def closure(module):
    """Return the modules that importing a module loads, without the packages around them."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {other for name in new for other in imports(name, inner=False)} - found
    return found


def lines_of_code(module):
    """Return the number of lines without comments, docstrings and empty lines."""
    lines = set()
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(FILES[module].read_text()).readline):
        if token.type not in (*blank, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(module)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def methods_of_classes():
    """Yield the classes of the package with the number of their own methods and properties."""
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                yield node.name, len({member.name for member in node.body if isinstance(member, functions)})


def reaches_inside(path):
    """Return whether a test uses an internal member of what its name calls a cluster, or any ``sharing``."""
    used = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in INTERNAL
    ]
    return any(node.attr == "sharing" or ast.unparse(node.value).endswith(CLUSTERS) for node in used)


def test_imports_point_down_only():
    assert set().union(*ROOMS.values()) <= {name.split(".")[1] for name in FILES if "." in name}
    up = []
    for module in FILES.keys() - {"dask_cml"}:  # which offers names of all rooms
        for other in imports(module) - {"dask_cml"}:
            if ORDER.index(room_of(other)) > ORDER.index(room_of(module)) and (module, other) != ATTACHES:
                up.append(f"{module} -> {other}")
    assert sorted(up) == []
    cluster, sharing = ATTACHES
    assert sharing in imports(cluster)
    assert sharing not in imports(cluster, inner=False)


def test_no_modules_and_no_packages_import_each_other():
    graph = {module: imports(module) - {"dask_cml"} for module in FILES.keys() - {"dask_cml"}}
    graph[ATTACHES[0]].discard(ATTACHES[1])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    packages = {path.name for path in ROOT.iterdir() if path.is_dir()}
    imported = set()
    for module in FILES.keys() - {"dask_cml"}:
        for other in imports(module) - {"dask_cml"}:
            imported.add((module.split(".")[1], other.split(".")[1]))
    both = {(one, other) for one, other in imported if one < other and (other, one) in imported}
    assert sorted(pair for pair in both if packages.issuperset(pair)) == []


def test_the_core_is_small_enough_to_be_read():
    loaded = closure("dask_cml.cluster")
    assert len(loaded) <= MOST_MODULES, "\n".join(sorted(loaded))
    assert sum(map(lines_of_code, loaded)) <= MOST_LINES
    assert {name: n for name, n in methods_of_classes() if n > MOST_METHODS} == {}


def test_a_cluster_is_a_speccluster_whose_step_is_its_own():
    assert CMLCluster.__bases__ == (SpecCluster,)
    assert "_correct_state_internal" in vars(CMLCluster)


def test_only_clusters_py_and_the_simulated_world_reach_inside_of_a_cluster():
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    assert any(name.startswith("promises/") for name in paths)
    found = {name for name, path in paths.items() if reaches_inside(path)}
    assert {name for name in found if name != "clusters.py" and not name.startswith("simulated/")} == set()
