"""Plays the episode of a seed."""

import contextlib
import gc
import io
import logging
import tempfile
import threading
import traceback
import warnings
from collections.abc import Collection
from pathlib import Path
from unittest import mock

from simulated.faults import Luck
from simulated.world import World, world

from .episode import Episode, Outcome
from .log import isolated_loggers
from .schedule import MORE, schedule_of

# Dask removes the scratch folders of killed processes when Python exits, which logs that they are gone.
logging.getLogger("distributed.diskutils").setLevel(logging.CRITICAL)


def play(seed: int, more: Collection[str] = tuple(MORE)) -> Outcome:
    """Play the episode of a seed. An exception that it or a thread raises is a violation, too."""
    schedule = schedule_of(seed, more)
    outcomes = [Outcome()]

    async def main(it: World) -> None:
        episode = Episode(schedule, it)
        outcomes.append(episode.outcome)
        await episode.play()

    def note_thread(ended: threading.ExceptHookArgs) -> None:
        raised = traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)
        outcomes[-1].violations.append("".join(raised))

    with tempfile.TemporaryDirectory(prefix="episode-", ignore_cleanup_errors=True) as directory:
        state = Path(directory) / "state"
        state.mkdir(mode=0o700)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),  # of commands
                contextlib.redirect_stderr(io.StringIO()),  # of interrupted starts
                mock.patch.object(threading, "excepthook", note_thread),
                world(state, luck=Luck(seed), named=schedule.named) as run,
            ):
                run(main)
        except Exception as error:
            outcomes[-1].violations.append("".join(traceback.format_exception(error)))
    outcome = outcomes[-1]
    outcome.story.insert(0, str(schedule))
    return outcome


def prepare() -> None:
    """Log nothing in this process, and collect garbage only between episodes, as ``conftest.py`` does."""
    gc.disable()
    for logger in (logging.getLogger(), *isolated_loggers()):
        logger.handlers = [logging.NullHandler()]


def play_quietly(seed: int, more: Collection[str] = tuple(MORE)) -> tuple[int, Outcome]:
    with warnings.catch_warnings():  # of coroutines that a dead process never awaited
        warnings.simplefilter("ignore")
        outcome = play(seed, more)
        gc.collect()
    return seed, outcome
