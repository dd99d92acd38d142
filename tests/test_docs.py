"""What the documentation says holds: its code runs, its commands, configuration and links exist.

The Python blocks of a page are one program. A comment ``<!-- not run: why -->`` before a block has it
compiled only. The examples of docstrings run, too.
"""

import asyncio
import contextlib
import doctest
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import dask
import jsonschema
import nbformat
import pytest
import yaml
from distributed import Client
from lab import PATIENCE, browser, chromium
from nbclient import NotebookClient

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
            # Errors in it name the page and the line.
            code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
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
    pages = [*PAGES, ROOT / "SECURITY.md", ROOT / "tests" / "README.md"]
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


#: By Sphinx's own numbers, the page whose heading is a word of the query comes first.
SEARCHED = {
    "index": "# Clusters\n```{toctree}\nquota\nsessions\n```",
    "quota": "# Quota\n\n## Queued\nTasks wait.\n\n## Sessions\nThey run.",
    "sessions": "# Run\n\n## Start\nEach runs code.\n\n## Why sessions are queued\nThe quota is used up.",
}


@pytest.mark.slow
def test_the_search_leads_to_the_section_that_has_most_of_the_words(tmp_path):
    pytest.importorskip("sphinx")
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    for name, text in SEARCHED.items():
        (tmp_path / f"{name}.md").write_text(f"{text}\n")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", DOCS, tmp_path, tmp_path / "html"]
    subprocess.run(build, check=True, timeout=240)
    with browser() as running:
        page = running.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(f"{(tmp_path / 'html' / 'search.html').as_uri()}?q=why+sessions+are+queued+quota")
        first = page.locator("#search-results li a").first
        assert first.inner_text() == "Run > Why sessions are queued"
        assert first.get_attribute("href") == "sessions.html#why-sessions-are-queued"


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
    monkeypatch.setattr("dask_cml.sharing.sharing.name_others", lambda _: None)
    with closing():
        mine = CMLCluster(name="mine", n_workers=1, quiet=True)
        mine.wait_for_workers(1)
        run_examples(filter(of_a_cluster, MODULES), cluster=mine)


EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = [pytest.param(path, id=path.name) for path in sorted(EXAMPLES.glob("*.ipynb"))]
SCRIPTS = [pytest.param(path, id=path.name) for path in sorted(EXAMPLES.glob("*.py"))]


@pytest.fixture
def laptop(platform, monkeypatch, tmp_path):
    """A folder on a machine that is no CML session; there goes what Jupyter writes to home folders."""
    monkeypatch.delenv("CDSW_ENGINE_ID", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # Notebooks run `python` in a shell, which is this one also where its environment was not activated.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    yield tmp_path
    assert platform.sessions()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(laptop, path):
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(laptop)}}
    NotebookClient(notebook, timeout=240, startup_timeout=240, resources=where).execute()


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS)
def test_script_runs(laptop, path):
    subprocess.run([sys.executable, str(path)], cwd=laptop, check=True, timeout=240)


@pytest.fixture
def job():
    """The command of a Job's script. CML runs scripts in IPython."""
    pytest.importorskip("IPython")
    return [sys.executable, "-m", "IPython", "--colors=nocolor", str(EXAMPLES / "job.py")]


def is_over(platform):
    """Whether all sessions have ended, or are being stopped."""
    return all(session["finished_at"] or session["stop_requested"] for session in platform.sessions())


@pytest.mark.slow
def test_a_job_that_fails_exits_with_another_status_and_leaves_no_session(platform, laptop, job):
    subprocess.run(job, cwd=laptop, check=True, timeout=240)
    result = laptop / "prices.json"
    assert len(json.loads(result.read_text())) == 100
    assert is_over(platform)
    result.unlink()
    result.mkdir()  # so the result cannot be written
    done = subprocess.run(job, cwd=laptop, timeout=240, capture_output=True, text=True)
    assert done.returncode == 1
    assert "IsADirectoryError" in done.stdout + done.stderr
    assert is_over(platform)


@pytest.mark.slow
def test_a_job_that_is_stopped_exits_with_another_status_and_leaves_no_session(platform, laptop, job, until):
    platform.configure(quota={"sessions": 1}, over_quota="wait")
    with subprocess.Popen(job, cwd=laptop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: [session["status"] for session in platform.sessions()].count("scheduling") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) not in (0, -signal.SIGTERM)
    assert is_over(platform)
