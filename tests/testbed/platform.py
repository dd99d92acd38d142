"""Answers to requests, with the faults and settings that apply to them."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask_cml.local import platform, state
from dask_cml.local.state import Session

from . import faults, networks
from .settings import settings
from .supervisor import Supervisor

#: The words of a refusal that no quota requires.
_REFUSED = "requested: pods=1, used: pods=1, limited: pods=1"


class Platform(platform.Platform):
    """The local platform with faults, settings and limits."""

    supervisor = Supervisor

    @property
    def shares_host_network(self) -> bool:
        return not settings().networks

    def launch(self, request: Mapping[str, Any]) -> Any:
        request = {**request, "env": {**settings().variables, **request["env"]}}
        launch = functools.partial(super().launch, request)
        return _answer(launch, "launch_workers", request["name"], request["code"])

    def own_sessions(self) -> Any:
        return _answer(super().own_sessions, "list_workers")

    def stop(self, session_id: str) -> int:
        session = state.read_session(session_id) or {"name": "", "code": ""}
        stop = functools.partial(super().stop, session_id)
        return _answer(stop, "stop_workers", session["name"], session["code"])

    def plan(self, request: Mapping[str, Any], live: Sequence[Session]) -> Session:
        session = super().plan(request, live)
        fate = faults.take_fate(request["name"], request["code"])
        if fate == "refused":
            session |= {"waits": False, "refused": _REFUSED}
        return {**session, **dataclasses.asdict(settings()), "fate": fate, "reason": None}

    def network(self, live: Sequence[Session]) -> dict[str, Any]:
        platform._PORTS = range(*settings().port_range)
        return networks.network() if settings().networks else super().network(live)


def _answer(do: Callable[[], Any], function: str, name: str = "", code: str = "") -> Any:
    """Answer a request of a function about a session, which takes effect by ``do()``."""
    time.sleep(settings().latency)
    return faults.answer(do, function, name, code)
