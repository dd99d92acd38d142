"""A stand-in for the clusters of ``dask cml serve``, with clusters in every state that the pages show."""

import copy
import time
import zlib
from typing import Any

from dask_cml.errors import NoSuchCluster
from dask_cml.records.history import EndedCluster, SessionHours, Usage, usage_of
from dask_cml.records.store import Record
from dask_cml.sessions.entry import Launch

GIB = 2**30
QUOTA = "2 of 4 workers launched: exceeded quota: cpu=4, used: 14, limited: 16"
REFUSED = (
    "the platform refused the scheduler's session: exceeded quota: memory=64Gi, used: 112Gi, limited: 128Gi\n"
    "Ask for less memory, or delete another cluster."
)


def group(name: str = "default", wanted: int = 2, arrived: int = 2, **more: Any) -> dict[str, Any]:
    described = {
        "name": name,
        "n_workers": wanted,
        "n_arrived": arrived,
        "n_waiting": 0,
        "cpu": 4.0,
        "memory": 16.0,
        "nvidia_gpu": 0,
        "nthreads": 4,
        "processes": 1,
        "resources": {},
        "adapts": None,
    }
    return {**described, **more}


def cluster(name: str, *groups: dict[str, Any], status: str = "running", **more: Any) -> dict[str, Any]:
    arrived = sum(about["n_arrived"] for about in groups)
    described = {
        "name": name,
        "address": f"cml://{name}",
        "status": status,
        "words": status,
        "problem": None,
        "groups": [*groups],
        "n_workers": sum(about["n_workers"] for about in groups),
        "n_arrived": arrived,
        "threads": 4 * arrived,
        "memory": 16 * arrived * GIB,
        "created": "2030-01-01T10:00:00+00:00",
        "age": 3 * 3600.0,
        "most_age": None,
        "ends": [],
        "by": "alice",
        "kept": True,
        "session_hours": 8.25,
        "tasks_done": 0,
    }
    return {**described, **more}


def several() -> list[dict[str, Any]]:
    gpus = group("gpu", 2, 1, cpu=8.0, memory=64.0, nvidia_gpu=1, nthreads=8, resources={"GPU": 1.0})
    nothing = dict.fromkeys(("threads", "memory", "session_hours", "tasks_done"))
    adapting = group("default", 3, 3, adapts={"minimum": 0, "maximum": 10})
    return [
        cluster(
            "churn-model",
            adapting,
            gpus,
            words="running, 1 queued for 3 min",
            tasks_done=12840,
            age=90061.0,
            most_age=48 * 3600,
            session_hours=61.75,
        ),
        cluster("etl", group(wanted=24, arrived=24), by="bob", tasks_done=231100, session_hours=102.5),
        cluster(
            "forecast",
            group(wanted=4, arrived=2),
            words="running, 1 pending, 1 queued for 3 min",
            problem=QUOTA,
            tasks_done=725,
            kept=False,
        ),
        cluster(
            "morning",
            group(wanted=2, arrived=0),
            status="starting",
            words="starting, scheduler queued for 3 min",
            threads=0,
            memory=0,
            age=180.0,
            session_hours=0.0,
            tasks_done=None,
        ),
        cluster("night", status="failed", problem=REFUSED, age=40.0, **nothing),
        cluster(
            "old",
            status="not answering",
            problem="its scheduler did not answer within 5 s",
            age=500000.0,
            by=None,
            kept=False,
            **nothing | {"session_hours": 8.25},
        ),
    ]


def session(name: str, status: str = "running", **more: Any) -> dict[str, Any]:
    described = {
        "role": "worker",
        "name": name,
        "id": f"k3j9x2{zlib.crc32(name.encode()):010}",
        "status": status,
        "age": 10800.0,
        "cpu": 4.0,
        "memory": 16.0,
        "nvidia_gpu": 0,
        "link": f"https://ml.example.com/alice/project/engines/{name}",
    }
    return {**described, **more}


def sessions_of(described: dict[str, Any]) -> list[dict[str, Any]]:
    name = described["name"]
    if described["status"] == "failed":
        return []
    found = [session(f"{name}-scheduler", role="scheduler", cpu=1.0, memory=2.0)]
    for about in described["groups"]:
        for i in range(about["n_workers"]):
            key = f"{name}-{i}" if about["name"] == "default" else f"{name}-{about['name']}-{i}"
            size = {"cpu": about["cpu"], "memory": about["memory"], "nvidia_gpu": about["nvidia_gpu"]}
            here = i < about["n_arrived"]
            found.append(session(key, "connected" if here else "queued for 3 min", **size))
            if not here:
                found[-1].update(link=None, age=180.0)
    return found


def usage() -> Usage:
    return Usage(
        scheduler=SessionHours(1, 25.0, 25.0, 50.0, 0.0),
        default=SessionHours(4, 12.5, 50.0, 200.0, 0.0, {"evicted": 2, "out of memory": 1}),
        gpu=SessionHours(2, 4.0, 32.0, 256.0, 4.0),
    )


def ended() -> list[EndedCluster]:
    end = 1795401000.0
    known = {"user": "alice", "session": None, "usage": usage()}
    return [
        EndedCluster(
            name="churn-model",
            id="00000000000000aa",
            created=end - 6 * 3600 - 60,
            ended=end,
            why="idle for 1800 s",
            tasks_done=12840,
            most_workers=12,
            **known,
        ),
        EndedCluster(
            name="<img src=x>'\"",
            id="00000000000000bb",
            created=end - 90000,
            ended=end - 86400,
            why="</title><script>alert(1)</script>",
            **{**known, "user": "<b>bob</b>"},
        ),
        EndedCluster(
            name="night",
            id="00000000000000dd",
            created=end - 90002,
            ended=end - 90001,
            why="closed by alice in session 6ubc0hm5d4mtzqt1 (process 92)",
            tasks_done=19,
            tasks_failed=1,
            failures=["train-17: ValueError('negative weight')"],
            **{**known, "usage": Usage()},
        ),
        EndedCluster(
            name="failed",
            id="00000000000000cc",
            created=end - 90001,
            ended=end - 90000,
            why="it did not start: CML refused to launch failed-scheduler: exceeded quota: cpu=4",
            **{**known, "user": None, "usage": Usage()},
        ),
    ]


class StandInClusters:
    """Answers as ``ProjectClusters`` does."""

    def __init__(self, clusters: list[dict[str, Any]]) -> None:
        self.found = clusters
        self.problem: str | None = None
        self.platform = "local"
        self.over = ended()

    def find(self, name: str) -> Record:
        starts = {"scheduler": (1.0, ""), f"{name}-0": (7.0, ""), f"{name}-1": (45.0, "evicted")}
        starts[f"{name}-2"] = (5000.0, "evicted")
        launches = [
            Launch(key, key, None, 0, started=started, ended=int(started) + 15_000, cause=cause)
            for key, (started, cause) in starts.items()
        ]
        queued = Launch("queued", f"{name}-3", None, 0)
        return Record(name, launches={queued.id: queued}, ended={launch.id: launch for launch in launches})

    async def ended(self, id: str | None = None) -> list[EndedCluster]:
        chosen = [one for one in self.over if id in (None, one.id)]
        if id is not None and not chosen:
            raise NoSuchCluster(id)
        return chosen

    def describe(self) -> list[dict[str, Any]]:
        found = copy.deepcopy(self.found)
        return [
            known | {"usage": usage_of(self.find(known["name"]), time.time()).to_json()} for known in found
        ]

    async def details(self, name: str) -> dict[str, Any]:
        for known in self.describe():
            if known["name"] == name:
                sessions = sessions_of(known)
                logs = ["Scheduler", *(one["name"] for one in sessions if one["link"])][: len(sessions)]
                return {
                    **known,
                    "sessions": sessions,
                    "logs": [*logs, f"{name}-90"] if sessions else [],
                    "usage": (usage() if sessions else Usage()).to_json(),
                    "cost": usage().total.cost if sessions else None,
                    "client": f'Client("cml://{name}")',
                    "security": known["kept"],
                    "dashboard_id": name if known["status"] == "running" else None,
                }
        raise NoSuchCluster(name, tuple(known["name"] for known in self.found))
