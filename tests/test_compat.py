"""What dask-cml changes of other libraries is in one module, and each change says why and until when."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

from dask_cml import compat

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dask_cml"
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


@functools.cache
def modules():
    """Return all modules but the one that may change others, with their syntax trees."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "compat.py"]
    return [(path.relative_to(PACKAGE), ast.parse(path.read_text())) for path in paths]


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
    for path, tree in modules():
        imported = foreign(tree)
        for target, name in changed(tree):
            if ast.unparse(target).partition(".")[0].partition("[")[0] in imported:
                found.append(f"{path}: {ast.unparse(target)}.{name}")
    assert found == []


def test_whoever_catches_all_errors_raises_them_again_or_says_whose_they_are():
    silent = []
    for path, tree in modules():
        lines = (PACKAGE / path).read_text().splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.unparse(node.type) if node.type else "Exception"
                is_raised = any(isinstance(part, ast.Raise) for part in ast.walk(node))
            elif isinstance(node, ast.With):
                kinds, is_raised = ast.unparse(node.items[0].context_expr), False
            else:
                continue
            catches_all = re.search(r"(^|suppress\()(Base)?Exception\b", kinds)
            if catches_all and not is_raised and "  # " not in lines[node.lineno - 1]:
                silent.append(f"{path}:{node.lineno}")
    assert silent == []
