"""Each message that users may see is on the page about troubleshooting, with its meaning and a remedy.

The messages are collected from the code: those of errors, of warnings and errors in logs, and the lines that
a cluster prints. The page must contain their constant parts.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dask_cml

PACKAGE = Path(dask_cml.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
_ERRORS = {
    "CMLError",
    "CallFailed",
    "ClusterExists",
    "LaunchRefused",
    "NoAnswer",
    "NoSuchCluster",
    "NotOnCML",
    "NotPrivate",
    "OSError",
    "RuntimeError",
    "SchedulerTimeout",
    "SessionFailed",
    "TypeError",
    "ValueError",
    "WrongAnswer",
}
_LEVELS = {"warning", "error", "exception"}
#: Attributes with what a cluster shows as its problem.
_PROBLEMS = {"_end", "_failure", "_shortage"}
_PLACEHOLDER = "\0"
#: Folders whose messages are not for users of clusters, each with the reason.
_APART = {
    "cli": "the command line prints them next to the command, and `--help` explains the command",
    "doctor": "each finding says what it means and contains the command that solves it",
    "local": "the local platform is for tests and experiments",
    "scheduler": "the scheduler answers its own managers, which handle these errors",
    "serve": "the page shows them next to the form or the cluster",
}
#: Messages that the page need not contain, each with the reason. Regular expressions.
_EXCEPTIONS = {
    r"invalid ": "one entry of the page is for all invalid arguments and options",
    r"it |its ": "the reason in `… ignored: …` or `cannot read the record …: …`",
    r"\0 (is not the name of a session's file|does not describe a session)": "likewise",
    r"\0 is not in dask-cml's form": "likewise",
}


def text_of(node):
    """The text of a message with placeholders; None if it has no constant part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+.\d]*[a-z]", _PLACEHOLDER, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
    return None


def messages():
    """The messages in the code, each with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.parts[0] in _APART:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for text in said_by(node):
                if text.strip(_PLACEHOLDER + " "):
                    yield f"{module}:{node.lineno}", text


def said_by(node):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        error = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", None))
        if error in _ERRORS and node.exc.args:
            yield text_of(node.exc.args[0]) or ""
    elif isinstance(node, ast.Call):
        function, name = node.func, getattr(node.func, "attr", None)
        logs = name in _LEVELS and getattr(function.value, "id", None) == "logger"
        makes = name == "__init__" and isinstance(function.value, ast.Call)
        if (logs or makes or name in ("_log", "log", "failure")) and node.args:
            yield text_of(node.args[0]) or ""
        if getattr(function, "id", None) == "Loss" and len(node.args) > 1:
            yield text_of(node.args[1]) or ""
    elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", None) in _PROBLEMS:
        yield text_of(node.value) or ""


def pattern(text, placeholder):
    parts = [" ".join(part.split()) for part in text.replace("`", "").split(placeholder)]
    return ".{0,300}?".join(re.escape(part) for part in parts)


def on_the_page():
    """The paragraphs, code blocks and table rows of the page."""
    blocks = re.split(r"\n\s*\n|\n(?=\|)", PAGE.read_text())
    return [" ".join(block.replace("`", "").split()) for block in blocks]


FOUND = [*messages()]


@pytest.mark.parametrize("text", [pytest.param(text, id=place) for place, text in FOUND])
def test_the_page_has_each_message(text):
    if any(re.match(each, text) for each in _EXCEPTIONS):
        return
    shown = text.replace(_PLACEHOLDER, "…")
    assert any(re.search(pattern(text, _PLACEHOLDER), block) for block in on_the_page()), shown


def test_each_exception_is_needed():
    unused = [each for each in _EXCEPTIONS if not any(re.match(each, text) for _, text in FOUND)]
    assert unused == []
    assert all((PACKAGE / name).is_dir() for name in _APART)


def test_the_table_of_other_messages_has_none_that_the_code_lacks():
    [part] = re.findall(r"^## Other messages\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = [cell for cell in re.findall(r"^\| (.*?) \|", part, re.MULTILINE) if cell != "message"]
    shown = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    known = [" ".join(text.replace("`", "").replace(_PLACEHOLDER, "…").split()) for _, text in FOUND]
    assert shown

    def is_known(each):
        return any(
            re.search(pattern(each, "…"), text) or re.search(pattern(text, "…"), each) for text in known
        )

    assert [each for each in shown if not is_known(each)] == []
