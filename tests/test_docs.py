"""What the documentation says holds: its code runs, its commands, configuration and links exist.

The Python blocks of a page are one program. A comment ``<!-- not run: why -->`` before a block has it
compiled only. The examples of docstrings run, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import dask
import jsonschema
import pytest
import yaml
from distributed import Client

import dask_cml
from dask_cml import CMLCluster, cli
from dask_cml.records import operations, store

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "DEVELOPING")),
    *sorted(DOCS.glob("*.md")),
]
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(dask_cml.__path__, "dask_cml.")
    if not name.endswith("__main__")
]
#: Seconds for what takes a few on a quiet machine.
PATIENCE = 120.0
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>[\w-]*|\{[\w-]+\}[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A code block of a page, and the line on which its text begins."""

    page: Path
    line: int
    language: str
    text: str
    why_not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page, *languages):
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("text")) + 1
            yield Block(page, line, match["language"], match["text"], match["why"])


def program(block):
    """Compile a block so that errors in it name the page and the line."""
    return compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")


@pytest.fixture
def project(platform, monkeypatch, tmp_path):
    """A session's home folder, and the local platform instead of CML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("cml", "cml.workers_v1", "cdsw"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is forgotten after the test
    platform.install()
    with dask.config.set({"cml.platform": "local"}):
        yield platform


@contextlib.contextmanager
def closing():
    """Close the clients and clusters that a program has made, also those that are to outlive it."""
    try:
        yield
    finally:
        for client in [*Client._instances]:
            client.close()
        for cluster in [*CMLCluster._instances]:
            cluster.close()
        asyncio.run(operations.end_all(store.records()))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page.name for page in PAGES if any(blocks(page, "python"))])
def test_the_python_code_of_a_page_runs(project, page):
    page = next(path for path in PAGES if path.name == page)
    names = {"__name__": page.stem}
    with closing():
        for block in blocks(page, "python"):
            code = program(block)
            if block.why_not_run is None:
                exec(code, names)


def test_the_commands_of_the_pages_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    for block in [block for page in PAGES for block in blocks(page, "console", "sh")]:
        text = block.text
        if block.language == "console":
            text = "".join(re.findall(r"^\$ (.*\n)", text, re.MULTILINE))
            assert text, f"{block.place}: no line begins with a prompt"
        subprocess.run(["bash", "-n"], input=text, check=True, text=True)
        for line in text.splitlines():
            for words in commands(line):
                check_command(words, block.place)


def commands(line):
    """The commands of a shell's line, each as its words."""
    words = []
    for word in shlex.split(line, comments=True):
        if word in ("&&", "|", ";"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def check_command(words, place):
    if words[:2] == ["python", "-m"]:
        words = words[2:]
        assert importlib.util.find_spec(words[0]), f"{place}: there is no module {words[0]}"
    if words[:2] == ["dask", "cml"]:
        check_command_line(cli.cml, words[2:])
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[([\w,]+)\]", words[-1]):
            there = importlib.metadata.metadata("dask-cml").get_all("Provides-Extra")
            assert {*extra.split(",")} <= {*there}, f"{place}: there is no such extra"


def check_command_line(command, words):
    """Parse a command line, which raises an error if a command or an option is not there."""
    words = ["-" if word.endswith(".yaml") else word for word in words]
    with command.make_context("dask", words, resilient_parsing=False) as context:
        if isinstance(command, click.Group):
            _name, subcommand, rest = command.resolve_command(context, words)
            check_command_line(subcommand, rest)


def test_the_configuration_on_the_pages_is_valid():
    schema = yaml.safe_load((ROOT / "dask_cml" / "cml-schema.yaml").read_text())
    arguments = inspect.signature(CMLCluster).parameters
    for block in [block for page in PAGES for block in blocks(page, "yaml")]:
        content = yaml.safe_load(block.text)
        jsonschema.validate({key: value for key, value in content.items() if key == "cml"}, schema)
        factory = content.get("labextension", {}).get("factory", content)
        names = {name.replace("-", "_") for name in factory.get("kwargs", {})}
        assert names <= {*arguments}, block.place


def test_the_links_of_the_pages_lead_to_files_and_their_headings():
    pages = [*PAGES, ROOT / "tests" / "README.md"]
    links = [(page, link) for page in pages for link in _LINK.findall(_BLOCK.sub("", page.read_text()))]
    for page, target in [(page, target) for page, target in links if "://" not in target]:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} has a link to {target}"
        assert file.is_relative_to(ROOT)
        if anchor:
            assert anchor in anchors(file), f"{page.name} has a link to {target}"


def test_the_pages_have_no_more_words_than_somebody_reads():
    words = sum(len(page.read_text().split()) for page in [ROOT / "README.md", *DOCS.glob("*.md")])
    assert words <= 16_000
    assert len((ROOT / "DEVELOPING.md").read_text().split()) <= 1_900


def anchors(page):
    """The anchors of a page's headings, as MyST and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def examples(module):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [example for example in finder.find(importlib.import_module(module)) if example.examples]


def of_a_cluster(module):
    """Whether examples of a module speak of a cluster that is there, named ``mine``."""
    lines = [line.source + line.want for example in examples(module) for line in example.examples]
    return any(re.search(r"\bcluster\.|\bmine\b", line) for line in lines)


def run_examples(modules, **names):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in [example for module in modules for example in examples(module)]:
        example.globs.update(names)
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.slow
def test_the_examples_of_docstrings_run(project):
    with closing():
        run_examples(module for module in MODULES if not of_a_cluster(module))


@pytest.mark.slow
def test_the_examples_that_speak_of_a_cluster_run(project, monkeypatch):
    # A new cluster says that there are others.
    monkeypatch.setattr("dask_cml.sharing.sharing.unclosed", list)
    with closing():
        mine = CMLCluster(name="mine", n_workers=1, quiet=True)
        mine.wait_for_workers(1)
        run_examples(filter(of_a_cluster, MODULES), cluster=mine)
