"""What users can do, in the words of the web UI."""

from __future__ import annotations

from dask_cml.advice import Advice, AskForLess, Scale, ShutDown
from dask_cml.errors import CMLError, reason_of


def words_of(error: BaseException) -> str:
    """Return an error as words for the web UI."""
    if isinstance(error, CMLError) and error.advice is not None:
        return f"{error.text}{error.joint}{in_web_ui(error.advice)}"
    return reason_of(error)


def in_web_ui(advice: Advice) -> str:
    """Return what a user can do in the web UI, where every worker group has a button to scale it.

    Examples
    --------
    >>> in_web_ui(Scale("lab", 1, group="gpu"))
    'scale worker group gpu to 1'
    """
    if isinstance(advice, Scale):
        return f"scale worker group {advice.group}" + ("" if advice.n is None else f" to {advice.n}")
    if isinstance(advice, AskForLess):
        return (
            "Ask for fewer or smaller workers. Or create the cluster without workers, then scale it: it "
            "launches as many as there is room for. The list of clusters shows what runs"
        )
    if isinstance(advice, ShutDown):
        return f"delete the cluster {advice.cluster}"
    return f"choose another name, or delete the cluster {advice.cluster}"
