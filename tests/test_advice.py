"""What a user can do, as Python, a shell and the web UI say it."""

from __future__ import annotations

from typing import get_args

import pytest

from dask_cml.advice import Advice, AskForLess, Scale, ShutDown, UseOrDelete
from dask_cml.cli import console
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused
from dask_cml.serve import words

LESS = "Ask for fewer or smaller workers. Or create the cluster "
ROOM = ": it launches as many as there is room for. "
LIST = "To see what runs, run `dask cml list`"
#: What each advice is in Python, in a shell, and in the web UI.
WORDS = {
    Scale("lab"): ("call cluster.scale(n)", "run `dask cml scale lab N`", "scale worker group default"),
    Scale("my lab", or_adapt=True): (
        "call cluster.scale(n) or cluster.adapt()",
        "run `dask cml scale 'my lab' N` or `dask cml adapt 'my lab' 0 10`",
        "scale worker group default",
    ),
    Scale("lab", 1, "gpu"): (
        "call cluster.scale(1, worker_group='gpu')",
        "run `dask cml scale lab 1 --group gpu`",
        "scale worker group gpu to 1",
    ),
    ShutDown("lab"): ("call cluster.shutdown()", "run `dask cml delete lab`", "delete the cluster lab"),
    AskForLess(): (
        f"{LESS}with n_workers=0 and call cluster.scale(n){ROOM}{LIST}",
        f"{LESS}with --n-workers 0 and run `dask cml scale NAME N`{ROOM}{LIST}",
        f"{LESS}without workers, then scale it{ROOM}The list of clusters shows what runs",
    ),
    UseOrDelete("my lab"): (
        "to connect to it, pass create_mode='create-or-connect' or call CMLCluster.from_name('my lab'); "
        "to delete it, run `dask cml delete 'my lab'`",
        "to delete it, run `dask cml delete 'my lab'`",
        "choose another name, or delete the cluster my lab",
    ),
}


def test_all_advice_is_here():
    assert {type(advice) for advice in WORDS} == {*get_args(Advice)}


@pytest.mark.parametrize("advice", WORDS, ids=repr)
def test_every_place_says_advice_in_its_own_words(advice):
    assert (str(advice), console.in_shell(advice), words.in_web_ui(advice)) == WORDS[advice]


@pytest.mark.parametrize(
    ("error", "before"),
    [
        (ClusterExists("lab"), "a cluster named 'lab' exists already: "),
        (LaunchRefused("lab-0", "no quota", advice=AskForLess()), "CML refused to launch lab-0: no quota\n"),
        (CMLError("not yet:", Scale("lab")), "not yet: "),
        (CMLError("not yet"), "not yet"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_ends_with_its_advice(error, before):
    in_python = in_shell = in_web_ui = ""
    if error.advice is not None:
        in_python, in_shell = str(error.advice), console.in_shell(error.advice)
        in_web_ui = words.in_web_ui(error.advice)
    assert str(error) == f"{before}{in_python}"
    assert console.words_of(error) == f"{before}{in_shell}"
    assert words.words_of(error) == f"{before}{in_web_ui}"


def test_a_shell_shows_the_first_line_of_a_long_reason_before_the_advice():
    error = LaunchRefused("lab-0", "no quota\nfor pods\n", advice=AskForLess())
    first, second = console.words_of(error).splitlines()
    assert first == "CML refused to launch lab-0: no quota"
    assert second == console.in_shell(AskForLess())
