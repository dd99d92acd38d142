"""The size of a session bounds the memory of all its processes, and its scratch space is limited, too."""

from __future__ import annotations

import signal

import pytest

from dask_cml.local import state

from .conftest import FOREVER

pytestmark = pytest.mark.slow
#: GiB of the sessions, and MiB that are too many for them.
SIZE, TOO_MUCH = 0.1875, 300
AT_ONCE = f"block = bytearray({TOO_MUCH} << 20)"
GROWING = f"""
import time
blocks = []
for _ in range({TOO_MUCH} // 10):
    blocks.append(bytearray(10 << 20))
    time.sleep(0.01)
"""
#: Takes memory, then more in another process, and says how that process ended.
TWO_PROCESSES = """
import subprocess, sys, time
block = bytearray({first} << 20)
code = "{before}; block = bytearray({second} << 20); import time; time.sleep(600)"
status = subprocess.run([sys.executable, "-c", code]).returncode
time.sleep(1)
open({path!r}, "w").write(str(status))
"""


@pytest.fixture
def limited(platform):
    """Let the kernel limit the memory of sessions."""
    if not platform.settings().memory_limit:
        pytest.skip("this user may not create memory cgroups")


@pytest.fixture
def reason(platform):
    """Return why the platform let a session fail."""

    def reason(session):
        return next(other["reason"] for other in platform.sessions() if other["id"] == session["id"])

    return reason


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("code", [AT_ONCE, GROWING])
def test_session_over_its_memory_is_killed(platform, launch, reaches, reason, code):
    [session] = launch(code=f"{code}\nprint('survived')\n{FOREVER}", memory=SIZE)
    ended = reaches(session, "failed", "succeeded")
    assert ended["status"] == "failed"
    assert "reason" not in ended
    assert reason(session) == "out of memory"


@pytest.mark.usefixtures("limited")
def test_all_processes_of_a_session_share_its_memory_and_die_together(launch, reaches, reason, directory):
    path = directory / "survived"
    code = TWO_PROCESSES.format(first=120, second=120, before="pass", path=str(path))
    [session] = launch(code=code, memory=SIZE)
    reaches(session, "failed")
    assert reason(session) == "out of memory"
    assert not path.exists()


@pytest.mark.usefixtures("limited")
def test_older_nodes_kill_the_largest_process_only(platform, launch, reaches, reason, directory):
    platform.configure(over_memory="process")
    path = directory / "status"
    [session] = launch(
        code=TWO_PROCESSES.format(first=60, second=TOO_MUCH, before="pass", path=str(path)), memory=SIZE
    )
    reaches(session, "succeeded")
    assert path.read_text() == str(-signal.SIGKILL)
    assert reason(session) is None


@pytest.mark.usefixtures("limited")
def test_session_survives_the_session_that_launched_it(platform, launch, reaches, until, directory):
    path = directory / "launched"
    inner = f"import time; open({str(path)!r}, 'w').close(); time.sleep(600)"
    outer = (
        "from dask_cml import local\nimport os, time\n"
        f"[session] = local.launch_workers(1, 1, 1, name='inner', code={inner!r})\n"
        f"while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
    )
    [session] = launch(code=outer + AT_ONCE, memory=SIZE)
    reaches(session, "failed")
    statuses = {session["name"]: session["status"] for session in platform.sessions()}
    assert statuses == {"": "failed", "inner": "running"}
    platform.stop_workers(platform.sessions()[-1]["id"])


def test_session_over_its_scratch_space_is_evicted_with_notice(platform, launch, reaches, reason, directory):
    platform.configure(scratch=10_000_000, stop_grace=600)
    path = directory / "notice"
    code = (
        "import signal, sys, tempfile, time\n"
        f"def leave(*_): open({str(path)!r}, 'w').close(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "file = tempfile.NamedTemporaryFile(); file.write(bytes(20_000_000)); file.flush()\n"
        "time.sleep(600)"
    )
    [session] = launch(code=code)
    reaches(session, "failed")
    assert reason(session) == "scratch full"
    assert path.exists()
    assert not (state.folder_of(session["id"]) / "tmp").exists()
