"""Plays many episodes, and prints what they have shown: ``cd tests; python -m explorer 10000``."""

import argparse
import functools
import multiprocessing
import random
import statistics
import time

from .episode import Outcome
from .play import play_quietly, prepare
from .schedule import MORE

#: Episodes after which the figures so far are printed.
_OFTEN = 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m explorer", description=main.__doc__)
    parser.add_argument("episodes", type=int, help="how many")
    parser.add_argument("--first", type=int, default=random.randrange(10**6), help="the first seed")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument("--story", action="store_true", help="print what happens in each episode")
    parser.add_argument("--more", nargs="*", choices=[*MORE], default=[*MORE], help="which further steps")
    arguments = parser.parse_args()
    play = functools.partial(play_quietly, more=arguments.more)
    seeds = range(arguments.first, arguments.first + arguments.episodes)
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    # Some memory of each world stays, so processes are replaced.
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare, maxtasksperchild=50) as pool:
        for seed, outcome in pool.imap_unordered(play, seeds):
            outcomes.append(outcome)
            if outcome.violations:
                print(f"seed {seed}: {outcome.violations[0]}", flush=True)
            if arguments.story:
                print("\n".join(outcome.story), flush=True)
            if len(outcomes) == arguments.episodes or len(outcomes) % _OFTEN == 0:
                print(f"{len(outcomes)} episodes in {time.monotonic() - began:.0f} s", flush=True)
                print(figures(outcomes), flush=True)
    return sum(bool(outcome.violations) for outcome in outcomes)


def figures(outcomes: list[Outcome]) -> str:
    """Return the figures of all episodes: violations, seconds of convergence, leaked session-seconds."""
    violations = sum(bool(outcome.violations) for outcome in outcomes)
    lines = [f"violations: {violations}"]
    converged = sorted(outcome.converged for outcome in outcomes if outcome.converged is not None)
    if len(converged) > 1:
        percentiles = statistics.quantiles(converged, n=100, method="inclusive")
        p50, p99, most = percentiles[49], percentiles[98], converged[-1]
        lines.append(f"convergence of {len(converged)}: p50 {p50:.1f} s, p99 {p99:.1f} s, max {most:.1f} s")
    leaked = [outcome.leaked for outcome in outcomes]
    mean, most = statistics.mean(leaked), max(leaked)
    lines.append(f"leaked session-seconds: {sum(leaked):.0f}, mean {mean:.2f}, max {most:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
