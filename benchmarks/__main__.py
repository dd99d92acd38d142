"""``python -m benchmarks``: measure, show tables, and write figures and plots."""

from __future__ import annotations

import argparse

from benchmarks import (
    adapt,
    close,
    encryption,
    failover,
    forwarding,
    idle,
    imports,
    memory,
    mixed,
    register,
    scale,
    serve,
    start,
)

BENCHMARKS = {
    "start": start,
    "failover": failover,
    "scale": scale,
    "close": close,
    "adapt": adapt,
    "mixed": mixed,
    "imports": imports,
    "register": register,
    "idle": idle,
    "forwarding": forwarding,
    "serve": serve,
    "encryption": encryption,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, "all"], default="all")
    parser.add_argument("--repeats", type=int, help="how often each is measured")
    arguments = parser.parse_args()
    names = [arguments.names] if isinstance(arguments.names, str) else arguments.names
    for name in BENCHMARKS if "all" in names else names:
        options = {} if arguments.repeats is None else {"repeats": arguments.repeats}
        report = BENCHMARKS[name].run(**options)
        report.save()
        BENCHMARKS[name].plot(report)


if __name__ == "__main__":
    main()
