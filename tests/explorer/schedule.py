"""What happens in an episode: all of it follows from the seed."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulated.faults import CALM, FATES, OUTAGE, ROUGH, STORM, Weather

NAME = "mine"
#: How an episode ends: the last request is carried out; all processes die; somebody closes or deletes it.
ENDINGS = {"settle": 6, "abandon": 3, "shut down": 2, "delete": 2}
WEATHERS = {"calm": CALM, "rough": ROUGH, "storm": STORM, "outage": OUTAGE, "fates": Weather(fates=FATES)}


@dataclass(frozen=True)
class Step:
    """Something that is done, some seconds after the step before it."""

    after: float
    who: str
    what: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"+{self.after:.2f} s  {self.who}: {self.what}{self.arguments or ''}"


@dataclass(frozen=True)
class Crash:
    """The end of a process, right after so many calls of the platform or changes of files."""

    what: str
    after: int


@dataclass(frozen=True)
class Schedule:
    #: Decides what the platform does.
    seed: object
    options: Mapping[str, Any]
    steps: tuple[Step, ...]
    crashes: Mapping[str, Crash] = field(default_factory=dict)
    weather: str = "calm"
    #: Whether sessions have names on the platform, and the creator's class its own names of workers.
    named: bool = True
    names_workers: bool = False
    ending: str = "settle"
    #: The last request, by worker group.
    last: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        lines = [f"seed {self.seed}, {self.weather}, {'named' if self.named else 'no names'}", options]
        if self.names_workers:
            lines.append("the creator's class names the workers")
        lines += map(str, self.steps)
        lines += [f"{who} dies after {crash.what} {crash.after}" for who, crash in self.crashes.items()]
        return "\n".join([*lines, f"ends with {self.ending}, last request {dict(self.last)}"])


def schedule_of(seed: int, more: Collection[str]) -> Schedule:
    return _Writer(random.Random(f"schedule {seed}"), more).write(seed)


class _Writer:
    def __init__(self, chance: random.Random, more: Collection[str]) -> None:
        # Of many kinds only some, so that they meet different others.
        self.chance = chance
        self.more = [name for name in more if len(more) <= 3 or chance.random() < 0.4]
        self.steps: dict[str, float] = dict(_STEPS)
        for name in self.more:
            self.steps |= MORE[name]
        self.crashes: dict[str, Crash] = {}
        self.commands = 0
        #: Seconds that the last of the lasting steps takes.
        self.lasts = 0.0

    def write(self, seed: object) -> Schedule:
        chance = self.chance
        processes = chance.choice([1, 1, 2])
        options: dict[str, Any] = {
            "n_workers": chance.randrange(4),
            "cpu": processes,
            "processes": processes,
            "shutdown_on_close": chance.random() < 0.5,
        }
        self.groups = ["default"]
        if chance.random() < 0.4:
            self.groups.append("big")
            options["worker_groups"] = {
                "big": {"n_workers": chance.randrange(3), "cpu": 3 - processes, "processes": 3 - processes}
            }
        if chance.random() < 0.35:
            self.crash("A", 0.5)
        steps = [Step(0.0, "A", "create")]
        for _ in range(chance.randint(3, 12)):
            [step] = chance.choices([*self.steps], [*self.steps.values()])
            steps.append(self.step(step))
            if step in _LASTING and chance.random() < 0.7:  # to its end
                steps.append(Step(chance.uniform(0.5, 1.2) * self.lasts, "world", "wait"))
        [ending] = chance.choices([*ENDINGS], [*ENDINGS.values()])
        return Schedule(
            seed=seed,
            options=options,
            steps=tuple(steps),
            crashes=self.crashes,
            weather=chance.choice(["calm", "calm", "fates", "rough", "storm"]),
            named=chance.random() < 0.8,
            names_workers="names" in self.more and chance.random() < 0.5,
            ending=ending,
            last={group: chance.randrange(4) for group in ("default", "big")},
        )

    def crash(self, who: str, share_of_writes: float = 0.3) -> None:
        what = "write" if self.chance.random() < share_of_writes else "call"
        # Most of what a process does first is what it does most rarely.
        most = self.chance.choice([4, 12, 40])
        self.crashes[who] = Crash(what, self.chance.randint(1, most))

    def step(self, what: str) -> Step:
        chance = self.chance
        after = chance.choice(
            [0.0, 0.0, chance.uniform(0.0, 0.5), chance.uniform(0.0, 4.0), chance.uniform(0, 20)]
        )
        who, name, arguments = _ACTORS.get(what, "world"), what, ()
        if who == "user":
            who = chance.choice(["A", "A", "B", "page"])
        elif who == "command":
            self.commands += 1
            who = f"command {self.commands}"
            if chance.random() < 0.3:
                self.crash(who)
        elif who == "A or B":
            who = chance.choice("AB")
        return Step(after, who, name, (*arguments, *self.arguments(what)))

    def arguments(self, what: str) -> tuple[Any, ...]:
        chance = self.chance
        group = chance.choice(self.groups)
        if what in ("scale", "run scale"):
            return chance.choice([0, chance.randrange(5), chance.randrange(5)]), group
        if what in ("adapt", "run adapt"):
            minimum = chance.randrange(3)
            return minimum, minimum + chance.randrange(3), group
        if what in ("add_group", "run add"):
            self.groups.append("late")
            return "late", chance.randrange(3)
        if what in ("delete_group", "run delete group"):
            return (chance.choice(self.groups),)
        if what == "submit":
            return chance.randint(1, 8), chance.choice([0.0, 0.0, 1.0])
        if what in ("evict", "freeze", "remove", "retire"):
            return (chance.randrange(8),)
        if what == "weather":
            return (chance.choice([*WEATHERS]),)
        if what == "quota":
            return chance.choice([None, 1, 2, 3, 4, 5]), chance.random() < 0.5
        if what == "lose schedulers":
            # Of each: seconds from its launch. Most need less than 5 s until they answer.
            n = chance.choice([1, 2, 2, 3, 6])
            return (
                tuple(chance.choice([0.0, chance.uniform(0, 5), chance.uniform(0, 20)]) for _ in range(n)),
            )
        if what == "stale":
            return (chance.choice([0.5, 3.0, 10.0]),)
        if what in ("kill", "end session"):
            return (chance.choice(["A", "A", "B", "page"]),)
        if what == "pause":
            return chance.choice(["A", "A", "B", "page"]), self.seconds(200), chance.random() < 0.7
        if what == "pause scheduler":
            return (self.seconds(200),)
        if what == "cut off":
            return chance.choice(["A", "A", "B", "page"]), self.seconds(300), chance.random() < 0.3
        if what == "connect in a task":
            return chance.randrange(8), chance.choice(["cluster", "cluster that scales", "client"])
        if what in ("run monitor", "run ctl list"):
            return chance.randint(1, 6), chance.uniform(0.0, 2.0)
        if what == "restart":
            return chance.choice("AAB"), chance.uniform(0.0, 20.0), chance.choice(["connect", "reopen"])
        if what == "leave alone":
            return self.seconds(90), chance.random() < 0.5
        if what == "pause resident":
            return (self.seconds(200),)
        if what == "outage":
            return self.seconds(200), chance.random() < 0.5
        if what == "add_by_hand":
            return (chance.choice([None, 3]),)
        if what == "renew_group":
            return "late", chance.randrange(3)
        return ()

    def seconds(self, most: float) -> float:
        """Return for how long something lasts: within the time limits of the product, or longer."""
        bounds = self.chance.choice([(5, 30), (5, most), (most / 2, most)])
        self.lasts = self.chance.uniform(*bounds)
        return self.lasts


#: What may happen, and how often.
_STEPS = {
    "scale": 10,
    "run scale": 5,
    "adapt": 3,
    "run adapt": 2,
    "add_group": 1,
    "run add": 1,
    "delete_group": 1,
    "run delete group": 1,
    "submit": 3,
    "forget": 1,
    "remove": 1,
    "retire": 1,
    "connect": 4,
    "leave": 1,
    "shut down": 0.4,
    "open page": 2,
    "close page": 1,
    "run delete": 0.4,
    "run prune": 0.7,
    "run list": 0.7,
    "evict": 3,
    "evict all": 1,
    "freeze": 1,
    "evict scheduler": 1,
    "lose schedulers": 2,
    "freeze scheduler": 0.2,
    "weather": 3,
    "quota": 1.5,
    "stale": 0.5,
    "kill": 2,
    "end session": 0.5,
}
#: What may happen, too, by the names with which it is switched on.
MORE: dict[str, dict[str, float]] = {
    "pauses": {"pause": 6.0},
    "busy": {"pause scheduler": 4.0},
    "outages": {"cut off": 6.0},
    "tasks": {"connect in a task": 5.0},
    "by hand": {"add_by_hand": 5.0},
    "names": {},
    "groups": {"renew_group": 4.0},
    "page": {"open page": 5.0, "delete in page": 0.3},
    "passers-by": {"run monitor": 6.0, "run ctl list": 3.0},
    "restarts": {"restart": 5.0},
    "leaving": {"keeper leaves": 5.0},
    "alone": {"leave alone": 6.0},
    "residents": {"leave alone": 5.0, "kill resident": 2.0, "freeze resident": 1.0, "pause resident": 2.0},
    "forbidden": {"leave alone": 5.0, "forbid launches": 3.0},
    "blackouts": {"outage": 4.0},
}
#: Steps that take their time.
_LASTING = ("pause", "pause scheduler", "cut off", "leave alone", "pause resident", "outage")
_ACTORS = {
    **dict.fromkeys(("scale", "adapt", "add_group", "delete_group", "remove"), "user"),
    **dict.fromkeys(("add_by_hand", "renew_group"), "user"),
    "delete in page": "page",
    **dict.fromkeys(("submit", "forget", "retire", "shut down"), "A or B"),
    **dict.fromkeys(("connect", "leave"), "B"),
    **dict.fromkeys(("open page", "close page"), "page"),
    **dict.fromkeys([step for step in _STEPS if step.startswith("run ")], "command"),
    **dict.fromkeys(("run monitor", "run ctl list"), "command"),
}
