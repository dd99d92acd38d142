"""Advice in messages, in the words of the place where they are read: Python, a shell, or the web UI.

Messages are written for Python, such as ``call cluster.scale(n)``.
"""

from __future__ import annotations

import re
import shlex

_CALL = re.compile(r"(call )?cluster\.(scale|adapt)\(([^()]*)\)")
_GROUP = re.compile(r"worker_group='([^']*)'")
_CONNECT = re.compile(r"to connect to it, pass create_mode=\S+ or call CMLCluster\.from_name\([^()]*\); ")


def for_shell(text: str, cluster: str) -> str:
    """Return a message with commands instead of calls.

    Parameters
    ----------
    text : str
        The message.
    cluster : str
        The name of the cluster.

    Examples
    --------
    >>> for_shell("lab has no workers yet: call cluster.scale(n) or cluster.adapt()", "lab")
    'lab has no workers yet: run `dask cml scale lab N` or `dask cml adapt lab 0 10`'
    >>> for_shell("call cluster.scale(1, worker_group='gpu')", "lab")
    'run `dask cml scale lab 1 --group gpu`'
    """

    def command(match: re.Match[str]) -> str:
        call, method, arguments = match.groups()
        amounts = "0 10"
        if method == "scale":
            amounts = arguments.partition(",")[0].upper()
        group = _GROUP.search(arguments)
        option = f" --group {shlex.quote(group[1])}" if group else ""
        return f"{'run ' if call else ''}`dask cml {method} {shlex.quote(cluster)} {amounts}{option}`"

    return _CONNECT.sub("", _CALL.sub(command, text)).replace("n_workers=0", "--n-workers 0")


def for_web_ui(text: str) -> str:
    """Return a message for the web UI, where a field for each worker group has its number of workers.

    Examples
    --------
    >>> for_web_ui("lab has no workers yet: call cluster.scale(n) or cluster.adapt()")
    'lab has no workers yet: set a number of workers'
    """
    text = re.sub(r" or cluster\.adapt\([^()]*\)", "", text)
    return _CALL.sub(
        lambda match: "set a number of workers" if match[1] else "a larger number of workers", text
    )
