"""The tables in README.md of promises and protections: they and the tests name each other."""

import ast
import re
from collections import Counter
from pathlib import Path

import dask_cml

TESTS = Path(__file__).parent
MODULES = sorted((TESTS / "promises").glob("test_*.py"))
#: How a cluster keeps its promises, which their tests do not know.
INNER = {"sharing", "groups", "processes", "launches", "record", "view", "is_keeper", "keeps", "ask"}


def chapter(title: str) -> str:
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (TESTS / "README.md").read_text(), re.M | re.S)
    return text


def rows(title: str) -> list[list[str]]:
    """Return the rows of the tables in a chapter, without their headings."""
    lines = [line for line in chapter(title).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] != "test"]


def named(text: str) -> list[tuple[str, str]]:
    """Return the files and functions of the tests that a text names."""
    return re.findall(r"`((?:promises/)?test_\w+\.py)::(test_\w+)`", text)


def defined(path: Path) -> list[str]:
    """Return the names of the tests in a module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.parse(path.read_text()).body
    return [node.name for node in nodes if isinstance(node, functions) and node.name.startswith("test_")]


def test_the_tests_that_the_readme_names_exist() -> None:
    found = named((TESTS / "README.md").read_text())
    assert found
    assert [(file, test) for file, test in found if test not in defined(TESTS / file)] == []


def test_each_test_of_a_promise_is_in_the_table_once() -> None:
    found = Counter(named(chapter("Promises")))
    tests = {(f"promises/{path.name}", test) for path in MODULES for test in defined(path)}
    assert found == dict.fromkeys(tests, 1)


def test_each_promise_names_its_page_and_one_test() -> None:
    for row in rows("Promises"):
        promise, pages, test = row
        assert promise
        assert re.search(r"\]\(\.\./[\w/.-]+(#[\w-]+)?\)", pages), row
        assert len(named(test)) == 1, row


def test_subjects_are_in_alphabetical_order() -> None:
    subjects = re.findall(r"^### `promises/(\w+\.py)`", chapter("Promises"), re.M)
    assert subjects == [path.name for path in MODULES]


def test_tests_of_promises_do_not_know_how_these_are_kept() -> None:
    nodes = [(path, node) for path in MODULES for node in ast.walk(ast.parse(path.read_text()))]
    for path, node in nodes:
        if isinstance(node, ast.Attribute):
            assert node.attr not in INNER, f"{path.name}:{node.lineno}"
            is_private = node.attr.startswith("_") and not node.attr.endswith("_")
            assert not is_private or node.attr == "_exit", f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dask_cml."):
            assert node.module in ("dask_cml.local", "dask_cml.cli"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "dask_cml":
            offered = {*dask_cml.__all__, "cli", "local"}
            assert {alias.name for alias in node.names} <= offered, f"{path.name}:{node.lineno}"
