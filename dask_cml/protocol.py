"""The protocol of the scheduler's plugin: its version, and the names of its handlers."""

from __future__ import annotations

import enum

#: Watchers and plugins of another version leave each other alone.
PROTOCOL = 12

#: Asks which cluster a scheduler belongs to.
HELLO = "cml_hello"
#: Returns the board when it changes. The comm's end is the watcher's end.
WATCH = "cml_watch"
#: Posts what a user asks for, see :class:`dask_cml.scheduler.board.Request`.
POST = "cml_post"
#: Lets the cluster run on without a user.
LIVE_ON = "cml_live_on"
#: Tells what the keeper says of the cluster.
REPORT = "cml_report"
#: Asks for the known work and the workers.
DEMAND = "cml_demand"
#: Asks when the scheduler heard of Dask workers last, and what they hold.
HELD = "cml_held"
#: Asks what was known last of Dask workers that have left.
LAST = "cml_last"
#: Asks which Dask workers have left for good: their nannies do not answer either.
ABANDONED = "cml_abandoned"
#: Tells the scheduler that the platform is about to stop the session of some Dask workers.
NOTICE = "cml_notice"
#: Asks for the dashboard. After the answer ``{"status": "OK"}``, the connection carries HTTP.
FORWARD = "cml_forward"
#: All of them. The methods of the plugin have these names without their first part.
HANDLERS = (HELLO, WATCH, POST, LIVE_ON, REPORT, DEMAND, HELD, LAST, ABANDONED, NOTICE, FORWARD)

#: The topic of the event that a Dask worker's process has ended, and that its nanny starts it again.
EXITED = "cml-exited"
#: The topic of the cluster's events in ``Client.get_events``.
TOPIC = "cml"
#: The topic of the lines that the keeper tells its user, for clients in other processes.
LINES = "cml-lines"
#: The topic of the event that the cluster ends, with the reason: clients do not wait for another scheduler.
END = "cml-end"


class Rank(enum.IntEnum):
    """Whether a watcher counts as a user, and may keep the cluster: the lower its rank, the rather."""

    #: A user's process in the session that owns the cluster's sessions. CML lists them to it.
    OWNER = 1
    #: The process in the scheduler's session.
    RESIDENT = 2
    #: Any other process of a user. It keeps the cluster only if the resident cannot launch.
    USER = 3
    #: A command of a user. It asks, and never keeps.
    COMMAND = 4
    #: What only shows clusters, or runs in the cluster's own sessions.
    OBSERVER = 5


#: The ranks of users.
USERS = (Rank.OWNER, Rank.USER, Rank.COMMAND)


class Role(enum.Enum):
    """What a process does for a cluster."""

    #: It has not started, or is closed.
    NONE = "none"
    #: It launches and stops the sessions.
    KEEPER = "keeper"
    #: It shows what another process does, and asks it for changes.
    FOLLOWER = "follower"
