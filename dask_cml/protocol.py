"""The protocol of the scheduler's plugin: its version, and the names of its handlers."""

from __future__ import annotations

#: Watchers and plugins of another version leave each other alone.
PROTOCOL = 11

#: Asks which cluster a scheduler belongs to.
HELLO = "cml_hello"
#: Returns the board when it changes. The comm's end is the watcher's end.
WATCH = "cml_watch"
#: Writes on the board, see :class:`dask_cml.scheduler.board.Board`.
SET = "cml_set"
#: Writes what the keeper says of the sessions.
REPORT = "cml_report"
#: Takes the keeper's lease, or gives it back.
LEASE = "cml_lease"
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

#: The topic of the event that a Dask worker's process has ended, and that its nanny starts it again.
EXITED = "cml-exited"
#: The topic of the cluster's events in ``Client.get_events``.
TOPIC = "cml"
#: The topic of the lines that the keeper tells its user, for clients in other processes.
LINES = "cml-lines"
#: The topic of the event that the cluster ends, with the reason: clients do not wait for another scheduler.
END = "cml-end"
