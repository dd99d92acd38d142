"""How often dask-cml looks, and how long it waits, in seconds. Tests change the one object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """Intervals, pauses and patience that no user sets, in seconds.

    Attributes
    ----------
    heartbeat, observer_heartbeat : float
        The longest time between two messages of a watcher, and of one that only observes.
    lease : float
        Silence of a watcher after which it counts as gone, and keeps no cluster any more.
    first_lease : float
        Time for which a scheduler waits for the keeper that has launched it. Calls of the platform may hang.
    reconnect : float
        Time after the keeper's last message in which it may connect again, before another one is picked.
    stay : float
        Time for which a user's process must be connected before the process in the scheduler's session hands
        the cluster over. Commands and monitors that pass by do not interrupt its work.
    collect : float
        Time for which the scheduler collects further changes before it answers watchers.
    scheduler_look : float
        Time between two looks of the scheduler at its watchers and workers.
    answer : float
        The scheduler's time to answer a question.
    retry : float
        Pause before a scheduler that did not answer is asked again.
    look, starting_look : float
        Time between two looks of the keeper at its sessions, and while some of them start.
    rest : float
        The longest time by which a look at many sessions delays the next one.
    pause, restart : float
        Time for which a Dask worker must be paused until the user is told, and for which the user is told
        that one was restarted.
    idle : float
        Time without tasks after which the user is told that the cluster is idle.
    goodbye : float
        The scheduler's time to inform workers and clients of its end.
    usual_retirement, long_retirement : float
        Time in which most workers move their data to others, and after which the user is told of the wait.
    stop : float
        Time in which the platform usually stops sessions. Until then nothing is launched, to free quota.
    launch : float
        Time in which the platform usually launches sessions. Until then the keeper does nothing else.
    listing : float
        Time in which the platform usually lists sessions. What can do without the list waits no longer.
    files : float
        The time of the project's file system to answer, before a cluster that ends goes on without it.
    finish : float
        Time without progress after which a process no longer waits for the end of a deleted group.
    strays : float
        Time between two looks for sessions of the cluster that its keeper does not know.
    stray : float
        Time for which a session must be a stray. Another process may be about to say that it has launched it.
    succession : float
        Time for which a process that does not keep the cluster leaves the next scheduler to the keeper.
    unlisted : float
        Time for which a session must be missing in the platform's list, which may be old, to be told as no
        longer listed. If its Dask worker is gone for as long, too, it is replaced.
    unreachable : float
        Time for which a scheduler must not be reached until the user is told.
    notice : float
        Time before a cluster reaches its limit of hours, when its users are told.
    save : float
        Time after which a scheduler saves what it tells its watchers later, such as the number of done tasks.
    silence : float
        A scheduler's silence after which users are told, and nobody waits longer for its answer.
    """

    heartbeat: float = 2.0
    observer_heartbeat: float = 10.0
    lease: float = 15.0
    first_lease: float = 60.0
    reconnect: float = 5.0
    stay: float = 30.0
    collect: float = 0.1
    scheduler_look: float = 0.5
    answer: float = 10.0
    retry: float = 1.0
    look: float = 3.0
    starting_look: float = 1.0
    rest: float = 4.0
    pause: float = 5.0
    restart: float = 60.0
    idle: float = 10.0
    goodbye: float = 3.0
    usual_retirement: float = 2.0
    long_retirement: float = 10.0
    stop: float = 5.0
    launch: float = 2.0
    listing: float = 3.0
    files: float = 10.0
    finish: float = 45.0
    strays: float = 15.0
    stray: float = 20.0
    succession: float = 30.0
    unlisted: float = 30.0
    unreachable: float = 30.0
    notice: float = 600.0
    save: float = 15.0
    silence: float = 120.0


timing = Timing()
