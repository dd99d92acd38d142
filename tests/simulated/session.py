"""A session of the simulated platform, and what the platform tells of it."""

import ast
import json
import re
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

ENDED = ("succeeded", "failed", "stopped", "timedout")
STAGES = ("scheduling", "starting", "running")


def now() -> datetime:
    return datetime.fromtimestamp(time.time(), timezone.utc)


@dataclass
class SimulatedSession:
    """A session, with what a test may set of it."""

    id: str
    master: str
    launched_with: dict[str, Any]
    #: Whether its launch was refused, and whether its launcher got its id.
    half_made: bool = False
    answered: bool = False
    status: str = "scheduling"
    ip_address: str | None = None
    listed: bool = True
    #: Whether somebody has stopped it. Its end may take some time.
    stop_requested: bool = False
    created_at: datetime = field(default_factory=now)
    running_at: datetime | None = None
    finished_at: datetime | None = None
    more: dict[str, Any] = field(default_factory=dict)
    _text: str | None = None

    @property
    def live(self) -> bool:
        return self.status not in ENDED

    @property
    def code(self) -> str:
        return str(self.launched_with.get("code", ""))

    @property
    def key(self) -> str:
        """What it is launched as: the name of a worker, ``scheduler``, or nothing."""
        arguments = program_of(self.code)
        if arguments is None:
            return ""
        command = arguments["command"]
        return str(command[command.index("--name") + 1]) if "--name" in command else "scheduler"

    def change(self, **values: Any) -> None:
        self._text = None
        for name, value in values.items():
            if name in ("ip_address", "listed", "stop_requested"):
                setattr(self, name, value)
            else:
                self.more[name] = value

    def reach(self, status: str) -> None:
        """Get to a status, unless the session has ended."""
        if not self.live:
            return
        self._text = None
        at = now() + timedelta(microseconds=1)
        if status == "running":
            self.running_at = at
        if status in ENDED:
            self.finished_at = max(at, (self.running_at or at) + timedelta(microseconds=1))
        self.status = status

    @property
    def text(self) -> str:
        """What is reported of it, as JSON."""
        if self._text is None:
            self._text = json.dumps(self.described())
        return self._text

    def described(self) -> dict[str, Any]:
        begin, end = self.running_at, self.finished_at
        return {
            "id": self.id,
            "status": self.status,
            "created_at": self.created_at.isoformat(),
            "running_at": begin and begin.isoformat(),
            "finished_at": end and end.isoformat(),
            "duration": (end - begin).total_seconds() if begin and end else None,
            "ip_address": self.ip_address or "unknown",
            "app_url": f"https://{self.id}.cml.example.com/",
            **({"name": self.launched_with["name"]} if "name" in self.launched_with else {}),
            **self.more,
        }


def program_of(code: str) -> dict[str, Any] | None:
    """Return the arguments of dask-cml's program in a session's code. None: the code is another one."""
    match = re.search(r"^session = (\{.*?^\})$", code, re.M | re.S)
    found: dict[str, Any] | None = ast.literal_eval(match[1]) if match else None
    return found
