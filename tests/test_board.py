"""The board of a cluster by itself: the mail of its users, the report of its keeper, and its term."""

from __future__ import annotations

import pytest

from dask_cml.scheduler import board as module
from dask_cml.scheduler.board import Board, Request

LIMITS = {"minimum": 4, "maximum": 5, "interval": 1.0, "wait_count": 3, "target_duration": 5.0}
ADAPT = Request(kind="adapt", limits=LIMITS)
GPU = Request(kind="add group", group="gpu", n=1, options={"cpu": 2})


def scale(n, group="default"):
    return Request(kind="scale", group=group, n=n)


@pytest.fixture
def board():
    return Board({"groups": {"default": {"target": 1}}}, keeper="keeper")


def post(board, *requests, sender="a"):
    for number, request in enumerate(requests, start=board.posted.get(sender, 0) + 1):
        board.post(sender, number, request)


def mail(board):
    return [(letter.number, letter.request) for letter in board.mail]


def targets(board):
    return {name: group.target for name, group in board.groups.items()}


def test_requests_are_kept_in_their_order_and_the_groups_are_as_after_them(board):
    close = Request(kind="close", names=["mine-0"])
    post(board, GPU, ADAPT)
    post(board, close, scale(3, "gpu"), sender="b")
    assert mail(board) == [(1, GPU), (2, ADAPT), (3, close), (4, scale(3, "gpu"))]
    assert targets(board) == {"default": 4, "gpu": 3}  # within the limits at once
    assert board.groups["default"].adapt == LIMITS
    post(board, scale(1), Request(kind="delete group", group="gpu"))
    assert targets(board) == {"default": 1}
    assert board.groups["default"].adapt is None
    post(board, ADAPT, Request(kind="stop adapting"))
    assert (targets(board), board.groups["default"].adapt) == ({"default": 4}, None)


def test_a_request_that_is_repeated_undoes_no_later_one(board):
    post(board, scale(2))
    post(board, scale(5), sender="b")
    before = board.to_json()
    board.post("a", 1, scale(2))
    assert board.to_json() == before
    board.post("a", 2, scale(2))
    assert targets(board) == {"default": 2}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (scale(1, "no"), "invalid worker_group='no': expected one of 'default', 'gpu'"),
        (Request(kind="delete group", group="no"), "invalid worker_group='no'"),
        (GPU, "invalid name='gpu': expected a name that no worker group"),
        (Request(kind="delete group"), "invalid name='default': expected a worker group other than"),
    ],
)
def test_a_request_that_cannot_be_carried_out_changes_nothing_and_may_be_repeated(board, request_, words):
    post(board, GPU)
    before = board.to_json()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{words}"):
            board.post("b", 1, request_)
    assert board.to_json() == before
    board.post("b", 1, scale(7))
    assert targets(board) == {"default": 7, "gpu": 1}


def test_a_full_mail_takes_no_more_requests_until_some_are_carried_out(board, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LETTERS", 2)
    post(board, GPU, scale(2))
    with pytest.raises(ValueError, match="no process manages the cluster: 2 requests wait"):
        post(board, scale(3, "gpu"))
    board.take_report({"groups": {"gpu": {}}, "taken": 1})
    post(board, scale(3, "gpu"))
    assert targets(board) == {"default": 2, "gpu": 3}


def test_mail_is_dropped_with_the_report_that_it_is_carried_out_and_no_other(board):
    post(board, scale(2), GPU, scale(3, "gpu"))
    report = {"groups": {"default": {"target": 2}, "gpu": {"target": 1}}, "taken": 2}
    board.take_report(report)
    assert (mail(board), targets(board)) == ([(3, scale(3, "gpu"))], {"default": 2, "gpu": 3})
    # The keeper scales by itself, and its user deletes the group.
    board.take_report({"groups": {"default": {"target": 1}}, "taken": 2})
    assert (len(board.mail), targets(board)) == (1, {"default": 1})
    board.take_report({"groups": {"default": {"target": 1}}, "taken": 3})
    assert mail(board) == []
    post(board, scale(5))
    assert mail(board) == [(4, scale(5))]
