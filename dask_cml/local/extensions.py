"""Extensions: Python files with hooks that bring sessions closer to those of CML.

:func:`dask_cml.local.configure` sets the paths. dask-cml's tests have extensions for memory cgroups, network
namespaces and faults of HTTP requests. An extension defines some of these functions:

- ``network(plan)``, when a session is launched: returns changes to its plan, with ``ip``, ``gateway`` and
  ``ports``. The session has a loopback of its own then.
- ``enter(plan)``, when it starts: returns the words before its command.
- ``memory(plan)``, when it starts: returns a substitute for :class:`processes.MemoryWatch`, or None.
- ``remove(plan)``, when its processes have ended.
- ``request(do, function, name, code)``: answers an HTTP request of a function about a session. ``do()`` takes
  effect, and returns the answer.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterable
from typing import Any

_load = functools.lru_cache(runpy.run_path)


def hooks(paths: Iterable[str], name: str) -> list[Callable[..., Any]]:
    """Return the functions of this name in extensions."""
    return [extension[name] for extension in map(_load, paths) if name in extension]
