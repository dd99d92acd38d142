"""The protocol between the scheduler's plugin and managers: its version, and the names of its handlers."""

from __future__ import annotations

#: Managers and plugins of another version leave each other alone.
PROTOCOL = 6

#: Asks which cluster a scheduler belongs to.
HELLO = "cml_hello"
#: Announces a manager, and returns what has changed since a revision. The comm's end is the manager's end.
WATCH = "cml_watch"
#: Carries out a manager's operations, see :class:`dask_cml.scheduler.wanted.Wanted`.
APPLY = "cml_apply"
#: Changes values that the scheduler keeps of its cluster: ``orphan_timeout`` and ``app_url``.
SET = "cml_set"
#: Asks for the known work and the workers.
DEMAND = "cml_demand"
#: Asks when the scheduler heard of Dask workers last, and what they hold.
HELD = "cml_held"
#: Tells the scheduler that the platform is about to stop the session of some Dask workers.
NOTICE = "cml_notice"
#: Asks for the dashboard. After the answer ``{"status": "OK"}``, the connection carries HTTP.
FORWARD = "cml_forward"

#: The topic of the cluster's events in ``Client.get_events``.
TOPIC = "cml"

#: Seconds between two messages of a manager, at most, and of a manager that only observes.
HEARTBEAT, OBSERVER_HEARTBEAT = 2.0, 10.0
#: Seconds without a message after which a manager counts as disconnected, and does not lead any more.
LEASE, OBSERVER_LEASE = 15.0, 40.0
#: Seconds between two signs of life of a scheduler, the times of its file, and of silence after which an
#: unreachable scheduler counts as dead.
SIGN_OF_LIFE, LONGEST_SILENCE = 15.0, 120.0
