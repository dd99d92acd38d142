"""The rooms of the package: the core, sharing above it, and the surfaces above both. Imports point down only.

Imports for type checking and imports inside of functions count, too.
"""

import ast
import inspect
import io
import re
import tokenize
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from distributed import SpecCluster

import dask_cml
from dask_cml import CMLCluster, compat

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
MOST_METHODS = 60
#: The most modules and lines of code that ``import dask_cml.cluster`` loads, without comments and docstrings.
#: They may only become smaller, but for mended faults and checks that must run before anything is launched.
MOST_MODULES, MOST_LINES = 29, 5545

TESTS = Path(__file__).parent
#: Members of a cluster that other code may replace at any time. Tests see them by functions of clusters.py.
INTERNAL = {"sharing", "processes", "look", "retirements"}
INTERNAL |= {"ending", "demand", "place", "view", "outbox", "failover", "groups", "api", "link"}
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
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue  # it loads nothing
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


def lines_of_code(module):
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
    loaded, new = set(), {"dask_cml.cluster"}  # without the packages around them
    while new:
        loaded |= new
        new = {other for name in new for other in imports(name, inner=False)} - loaded
    assert len(loaded) <= MOST_MODULES, "\n".join(sorted(loaded))
    assert sum(map(lines_of_code, loaded)) <= MOST_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in (node for module in FILES for node in ast.walk(tree_of(module))):
        if isinstance(node, ast.ClassDef):
            methods = {member.name for member in node.body if isinstance(member, functions)}
            assert len(methods) <= MOST_METHODS, node.name


def test_a_cluster_is_a_speccluster_whose_step_is_its_own():
    assert CMLCluster.__bases__ == (SpecCluster,)
    assert "_correct_state_internal" in vars(CMLCluster)


def test_only_clusters_py_and_the_simulated_world_reach_inside_of_a_cluster():
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    assert any(name.startswith("promises/") for name in paths)
    found = {name for name, path in paths.items() if reaches_inside(path)}
    assert {name for name in found if name != "clusters.py" and not name.startswith("simulated/")} == set()


FACTS = "Why", "Releases", "Until"
CHANGES = [
    change
    for change in map(inspect.unwrap, vars(compat).values())
    if inspect.isfunction(change) and change.__module__ == compat.__name__
]


def facts(change):
    """Return why a change is made, the releases that need it, and until when."""
    text = " ".join(inspect.getdoc(change).split())
    return [
        re.search(rf"\b{fact}: (.+?)(?= (?:Why|Releases|Until): | (?:Notes|Parameters) -|$)", text)
        for fact in FACTS
    ]


def test_each_change_says_why_for_which_releases_and_until_when():
    assert CHANGES
    assert [change.__name__ for change in CHANGES if not all(facts(change))] == []


def changed(tree):
    """Yield the attributes that a module assigns or deletes, also by ``setattr`` with a literal name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target, name, *_ = node.args
            if isinstance(name, ast.Constant):
                yield target, name.value


def foreign(tree):
    """Return the names of what a module imports from other packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("dask_cml"):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names - {"dask_cml"}


def test_no_other_module_changes_a_class_or_a_module_of_another_library():
    found = []
    for module in FILES.keys() - {compat.__name__}:
        imported = foreign(tree_of(module))
        for target, name in changed(tree_of(module)):
            if ast.unparse(target).partition(".")[0].partition("[")[0] in imported:
                found.append(f"{module}: {ast.unparse(target)}.{name}")
    assert found == []


def test_whoever_catches_all_errors_raises_them_again_or_says_whose_they_are():
    silent = []
    for module in FILES.keys() - {compat.__name__}:
        lines = FILES[module].read_text().splitlines()
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.unparse(node.type) if node.type else "Exception"
                is_raised = any(isinstance(part, ast.Raise) for part in ast.walk(node))
            elif isinstance(node, ast.With):
                kinds, is_raised = ast.unparse(node.items[0].context_expr), False
            else:
                continue
            catches_all = re.search(r"(^|suppress\()(Base)?Exception\b", kinds)
            if catches_all and not is_raised and "  # " not in lines[node.lineno - 1]:
                silent.append(f"{module}:{node.lineno}")
    assert silent == []
