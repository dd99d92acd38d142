"""Extensions of the local platform, which bring its sessions closer to those of CML than laptops need."""

from __future__ import annotations

from pathlib import Path

CGROUPS, FAULTS, NETWORKS = [
    str(Path(__file__).with_name(f"{name}.py")) for name in ("cgroups", "faults", "networks")
]
