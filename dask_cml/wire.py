"""The protocol between the scheduler and its managers: names of handlers."""

from __future__ import annotations

HEARTBEAT = "cml_manager_heartbeat"
SYNC = "cml_sync"
#: Asks the scheduler for its pending work and its workers.
DEMAND = "cml_demand"
#: Key of a manager's heartbeat. If true, the manager only observes: it does not keep an orphan running.
WATCHES = "watches"
#: Key of a manager's heartbeat. If true, the manager stays when others leave, and continues to adapt.
SERVES = "serves"
#: Asks the scheduler to connect to its dashboard. The scheduler answers ``{"status": "OK"}``.
FORWARD = "cml_forward"
