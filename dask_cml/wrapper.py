"""The program of a session: it starts the scheduler or the Dask workers, and keeps their output.

It runs in the session's own kernel, by its path, and imports only the standard library: the kernel may be
another Python than that of dask-cml, and its memory is the session's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Bytes of the output's end that are printed if the program fails, and their lines.
_KEPT, _LINES = 8192, 15
#: Bytes that a log keeps of its beginning, and of its end. It is shortened when it is three times as long.
_KEPT_OF_LOG = 50 * 2**20
_OMITTED = b"\n[output omitted: a log keeps its beginning and its end]\n"
#: Bytes that are copied at once.
_PART = 2**18
#: More bytes than any file of a cluster has that says something of it.
_LARGEST = 2**25
#: Seconds between two looks for a scheduler's file, and at its content.
_POLL_INTERVAL, _STATE_INTERVAL = 0.2, 15.0
#: Seconds between two signs of life of a scheduler, and how often in a row its cluster must be over then.
_SIGN_INTERVAL, _PROOFS = 5.0, 3
_REPLACED = "another scheduler replaces its scheduler"
#: The shares of the session's memory and scratch space above which the log says so, and seconds between two
#: reads of the memory. Another share by which the memory grows until the log says so again.
_FULL, _SCRATCH_FULL, _MEMORY_INTERVAL, _STEP = 0.85, 0.9, 0.02, 0.05
#: Seconds from the notice for the program to move its data, and then to end. The platform waits for 30.
_GRACE, _END = 20.0, 5.0
#: Seconds for which the output of a program that has ended may still arrive, and for what it has left running
#: to end after SIGTERM.
_DRAIN, _END_GROUP = 1.0, 2.0
#: The exit status that shells give then.
_CANNOT_START = 127
#: What is expanded in arguments and environment variables of users.
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_HOME = re.compile(r"(?:^|(?<=[:=]))~(?=[/:]|$)")


class Log:
    """The file for a program's output on the project file system, which only its owner can read.

    NFS shows a file to other sessions when it is closed, and only then reports a full disk. So every part is
    written separately. If that fails, the program goes on: otherwise, tasks that print would fail.

    Parameters
    ----------
    path : str
        The path of the file.
    cluster : _Cluster, optional
        The session's cluster. Nothing is written into the folder of another one that has its name since.

    Attributes
    ----------
    end : bytes
        The end of what was written here.
    """

    def __init__(self, path: str, cluster: _Cluster | None = None) -> None:
        self._path = path
        self._cluster = cluster
        self._missing = 0
        #: The size of the file after the last write.
        self._size = 0
        self._writing = threading.Lock()
        self.end = b""

    def write(self, output: bytes) -> None:
        """Append output, if possible."""
        with self._writing:
            self.end = (self.end + output)[-_KEPT:]
            if self._cluster and _record_in(self._cluster.folder) not in (None, self._cluster.record):
                return
            try:
                with open(self._path, "ab", opener=_safely) as file:
                    if self._missing:
                        lost = b"\n[%d bytes of output lost: the log could not be written]\n"
                        file.write(lost % self._missing)
                    file.write(output)
                    file.flush()
                    self._size = os.fstat(file.fileno()).st_size
                self._missing = 0
            except OSError:
                self._missing += len(output)

    def shorten(self) -> None:
        """Omit the middle of a long log, if possible. Only the session that prints may call this.

        The end is copied to its new place before the file is cut, so that a crash between loses nothing.
        """
        if self._size < 3 * _KEPT_OF_LOG:
            return
        with self._writing, contextlib.suppress(OSError), open(self._path, "r+b", opener=_safely) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 3 * _KEPT_OF_LOG:  # a task has replaced it
                return
            source = file.seek(size - _KEPT_OF_LOG)
            source += len(file.readline(_KEPT_OF_LOG // 100))  # the rest of a line
            file.seek(_KEPT_OF_LOG)
            file.write(_OMITTED)
            target = file.tell()
            # To the end, and not to `size`: the keeper of the cluster may add a line meanwhile.
            while True:
                file.seek(source)
                part = file.read(_PART)
                if not part:
                    break
                source += len(part)
                file.seek(target)
                target += file.write(part)
            file.truncate(target)


class _Cluster(NamedTuple):
    """The files of a session's cluster. See :func:`run`."""

    folder: str
    record: str | None = None
    scheduler_file: str | None = None
    next_board: str | None = None


def run(
    command: Sequence[str],
    log: str,
    program: str,
    folder: str,
    name: str | None = None,
    entry: str | None = None,
    record: str | None = None,
    scheduler_file: str | None = None,
    next_board: str | None = None,
    timeout: float = 0.0,
    connect_timeout: float = 0.0,
    dashboard_variable: str | None = None,
    passes_notice: bool = False,
    gives_signs: bool = False,
    memory: int = 0,
    scratch: int = 0,
    words: Sequence[str] = (),
    expanded_variables: str | None = None,
) -> None:
    """Run a program until it ends, and end what it has left running.

    Parameters
    ----------
    command : sequence of str
        The program with its arguments.
    log : str
        The file for its output.
    program : str
        The name of the program, for messages.
    folder : str
        The cluster's folder.
    name : str, optional
        The file in ``started``, which the first session with this name creates. Other sessions end at once.
    entry : str, optional
        The file in ``sessions`` that describes this session, with ``{id}``, ``{owner}`` and ``{launched}``.
    record : str, optional
        The id of the cluster's record.
    scheduler_file : str, optional
        The file of the session's scheduler in the folder. If it says that the cluster has ended, the session
        ends at once.
    next_board : str, optional
        The file in the folder that exists if another scheduler replaces the session's scheduler.
    timeout : float
        Time to wait for the scheduler's file, in seconds. 0: the program does not need the file.
    connect_timeout : float
        Time for the program to connect to the scheduler if its file exists already, in seconds.
    dashboard_variable : str, optional
        The program serves the dashboard on the port that the platform forwards to, and finds the port in
        this environment variable.
    passes_notice : bool
        Whether the program moves its data when the platform is about to stop the session.
    gives_signs : bool
        Whether to date the scheduler's file while the program runs, as a sign of life for other processes,
        to end the program with its cluster, and to enter its end into the record, which proves it to those of
        other sessions.
    memory : int
        The session's memory in bytes. If it is nearly full, the log says so. 0: do not check.
    scratch : int
        The session's scratch space in bytes. If the session must stop because the program's temporary files
        fill it, the log says so, and no data is moved. 0: do not check.
    words : sequence of str
        More arguments, in which variables and ``~`` are expanded.
    expanded_variables : str, optional
        The environment variable with further ones, as JSON, in which they are expanded.

    Raises
    ------
    RuntimeError
        If the program fails, or an argument names a variable that the session does not have.
    """
    cluster = _Cluster(folder, record, scheduler_file, next_board)
    why = None if name is None else _start(cluster, name, entry)
    if why is not None:
        print(f"{program} not started: {why}", flush=True)
        return
    is_inside = record is not None and log.startswith(os.path.join(folder, ""))
    output = Log(log, cluster if is_inside else None)
    try:
        env, temporary = _environment(expanded_variables)
        command = [*command, *(_expand(word, env) for word in words)]
        if timeout and scheduler_file in (_list(folder) or []):
            # The session was queued while the scheduler started. Of several equal options, the last counts.
            command += ["--death-timeout", str(connect_timeout)]
        if dashboard_variable is not None:
            # The platform forwards its https entry to this port of the session's loopback. It may differ from
            # the port of the session that launched this one.
            port = os.environ.get("CDSW_APP_PORT") or os.environ.get("CDSW_READONLY_PORT") or "8787"
            command += ["--dashboard-address", f"127.0.0.1:{port}"]
            env[dashboard_variable] = port
        for plain, braced in _VARIABLE.findall("\n".join(words)):
            if (plain or braced) not in env:
                raise RuntimeError(f"${plain or braced} in its arguments is not set")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # the leader of a process group
        )
    except (OSError, RuntimeError) as error:
        why = f"{program} not started: {error}"
        output.write(f"{why}\n[{program} exited with status {_CANNOT_START}]\n".encode())
        raise RuntimeError(why) from error
    if timeout:
        arguments = (process, time.monotonic() + timeout, cluster)
        threading.Thread(target=_wait_for_scheduler, args=arguments, daemon=True).start()
    if gives_signs:
        threading.Thread(target=_give_signs, args=(process, cluster), daemon=True).start()
    _handle_sigterm(process, output, passes_notice, temporary, scratch)
    files = _memory_files(memory) if memory else None
    if files is not None:
        threading.Thread(target=_watch_memory, args=(output, memory, *files), daemon=True).start()
    # What a task has started may hold the pipe and run on. So the pipe's end is not the program's end.
    keeping = threading.Thread(target=_keep_output, args=(process, output), daemon=True)
    keeping.start()
    process.wait()
    keeping.join(_DRAIN)
    _end_group(process.pid)
    keeping.join(_DRAIN)
    output.write(f"[{program} exited with status {process.returncode}]\n".encode())
    if gives_signs:
        _enter_end(cluster)
    shutil.rmtree(temporary, ignore_errors=True)
    # It has no handlers for its end before it has started, and after it has closed.
    if process.returncode not in (0, -signal.SIGUSR1, -signal.SIGINT):
        found = runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "words.py"))
        lines = output.end.decode(errors="replace").splitlines()[-_LINES:]
        print(*map(found["printable"], lines), sep="\n", flush=True)
        raise RuntimeError(f"{program} failed with exit status {process.returncode}; its log is {log}")


def _environment(expanded_variables: str | None) -> tuple[dict[str, str], str]:
    """Return the environment of the program, and its TMPDIR: a new folder, which is removed with it."""
    env = {**os.environ}
    variables = json.loads(env.pop(expanded_variables or "", "{}"))
    parent = _expand(variables.pop("TMPDIR", ""), env)
    # Dask workers spill there, unless an option names another folder.
    folder = tempfile.mkdtemp(prefix="dask-", dir=parent if os.path.isdir(parent) else None)
    env["TMPDIR"] = folder
    for name, text in variables.items():  # in order: one may contain another one
        env[name] = _expand(text, env)
    return env, folder


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Expand ``~`` and variables as a shell, but leave those that are not set as they are."""
    text = _HOME.sub(lambda match: env.get("HOME", match[0]), text)
    return _VARIABLE.sub(lambda match: env.get(match[1] or match[2], match[0]), text)


def _keep_output(process: subprocess.Popen[bytes], log: Log) -> None:
    """Write a program's output into a log.

    CML shows a session's own output in the console of the session that launched it.
    """
    assert process.stdout is not None
    with process.stdout as pipe:
        while part := pipe.read1(65536):  # type: ignore[attr-defined]
            log.write(part)
            log.shorten()


def _end_group(group: int) -> None:
    """End the processes of a group. The platform ends those that have left it, with the session."""
    deadline = time.monotonic() + _END_GROUP
    # Without a process, the group does not exist. On macOS, no signal reaches a process that nobody has
    # waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL / 4)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def _start(cluster: _Cluster, name: str, entry: str | None) -> str | None:
    """Take the session's name, and enter the session into the record. Return why it must not run."""
    session, deadline = os.environ.get("CDSW_ENGINE_ID", ""), time.monotonic() + _GRACE
    why = _why_over(cluster)
    if why is not None:
        return why
    try:
        _create_in_time(os.path.join(cluster.folder, "started", name), deadline, session)
    except FileNotFoundError:
        if cluster.record is not None:  # else the folder may hold no names
            return "its cluster was deleted"
    except FileExistsError:
        return "another session has its name"
    sessions = os.path.join(cluster.folder, "sessions")
    # Usually, the keeper has entered it.
    if entry and session and not any(file.startswith(f"{session},") for file in _list(sessions) or ()):
        owner, launched = os.environ.get("CDSW_MASTER_ID", ""), int(time.time())
        file = entry.format(id=session, owner=owner, launched=launched)
        try:
            with contextlib.suppress(FileExistsError):  # it has entered it just now
                _create_in_time(os.path.join(sessions, file), deadline)
        except FileNotFoundError:  # who deletes it does not know this session
            return "its cluster was deleted"
    return None


def _enter_end(cluster: _Cluster) -> None:
    """Enter into the record that the session's program has ended."""
    session = os.environ.get("CDSW_ENGINE_ID", "")
    end = os.path.join(cluster.folder, "sessions", f"{session},ended,{int(time.time())},")
    if session:
        with contextlib.suppress(OSError):  # the keeper was faster, or the cluster was deleted
            _create_in_time(end, time.monotonic() + _GRACE)


def _why_over(cluster: _Cluster) -> str | None:
    """Return why the session is of no use any more, if that is certain: files may be unreadable for a while.

    NFS may cache for long that something does not exist. Listing the folder that contains it refreshes this.
    """
    names = _list(cluster.folder) or []
    found = _record_in(cluster.folder)
    if found is None and _is_gone(cluster.folder):
        return "its cluster was deleted"
    if cluster.record is not None and found not in (None, cluster.record):
        return "another cluster has the name of its cluster"
    if cluster.next_board in names:
        return _REPLACED
    if cluster.scheduler_file in names:
        closed = _read_json(os.path.join(cluster.folder, cluster.scheduler_file)).get("closed")
        if closed is not None:
            return f"its cluster has ended: {closed}"
    return None


def _record_in(folder: str) -> str | None:
    """Return the id of the record in a cluster's folder. Return None if it is not known now."""
    return _read_json(os.path.join(folder, "record.json")).get("id")


def _list(folder: str) -> list[str] | None:
    """Return the names of the files in a folder. Return None if that is not possible now."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return None


def _read_json(path: str) -> dict[str, Any]:
    """Return the content of a file of another process. It is empty if that is not possible now."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        descriptor = _safely(path, os.O_RDONLY)
        try:  # `open` would ask the file server for more, every few seconds
            content = json.loads(os.read(descriptor, _LARGEST))
        finally:
            os.close(descriptor)
        if isinstance(content, dict):
            return content
    return {}


def _safely(path: str, flags: int) -> int:
    """Open a file that only its owner can read. Follow no link, and do not wait for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _create_in_time(path: str, deadline: float, content: str = "") -> None:
    """Create a file of the record. If the file system fails until a deadline, go on without, and say so."""
    while True:
        try:
            return _create(path, content)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            print(f"Not entered into the record: {error}", flush=True)
            if time.monotonic() > deadline:
                return
        time.sleep(1.0)


def _create(path: str, content: str = "") -> None:
    descriptor = _safely(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    # An empty file, as a full disk leaves it, takes the name, too: see dask_cml.records.store.read_started.
    with contextlib.suppress(OSError):
        try:
            os.write(descriptor, content.encode())  # in one step: its time says when the session has started
        finally:
            os.close(descriptor)


def _handle_sigterm(
    process: subprocess.Popen[bytes], log: Log, passes_notice: bool, temporary: str, scratch: int
) -> None:
    """Pass on the notice of the session's end, which the platform sends to the main process."""

    def end() -> None:
        if scratch and (used := _size(temporary)) > _SCRATCH_FULL * scratch:
            # To the scheduler, a task that fills the disk must look like one that fills the memory.
            log.write(b"[scratch: %d of %d bytes]\n" % (used, scratch))
            process.kill()
            return
        if passes_notice:
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        _end(process)

    with contextlib.suppress(ValueError):  # not the main thread
        # In a thread, because the sum of many files takes seconds.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end, daemon=True).start())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program, if it runs. Dask workers ignore SIGTERM, see :mod:`dask_cml.worker.process`."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()


def _size(folder: str) -> int:
    """Return the bytes on disk of a folder's files."""
    used = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(path, name)).st_blocks * 512
    return used


def _memory_files(memory: int) -> tuple[str, str] | None:
    """Return the kernel's files with the memory of this session, and its parts, if its size is limited."""
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in groups:
        for root, names, usage, limit in (
            ("/sys/fs/cgroup", "", "memory.current", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory", "memory.usage_in_bytes", "memory.limit_in_bytes"),
        ):
            if names not in controllers.split(","):
                continue
            # In a container, its own group is the root.
            for folder in (root + path, root):
                # Otherwise, the group includes other programs.
                if _number(os.path.join(folder, limit)) < 2 * memory:
                    return os.path.join(folder, usage), os.path.join(folder, "memory.stat")
    return None


def _number(path: str) -> float:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # not on this system, or no limit
        return float("inf")


def _watch_memory(log: Log, memory: int, usage: str, parts: str) -> None:
    """Write into the log when the session's memory is nearly full: its end may leave no time for more.

    It opens the files once, because the kernel counts an open file as memory of the session. While the
    kernel ends a worker's process at the limit, a process that needs memory may let it end another, too.
    """
    logged = 0
    with contextlib.suppress(OSError, ValueError), open(usage) as usage_file, open(parts) as parts_file:
        while True:
            usage_file.seek(0)
            used = int(usage_file.read())
            if used > _FULL * memory:
                parts_file.seek(0)
                stat = dict(line.split() for line in parts_file.readlines())
                # Without the cache of files, which the kernel frees before it kills.
                used = int(stat.get("anon") or stat.get("total_rss") or used)
            if used <= _FULL * memory:
                logged = 0
            elif used > logged + _STEP * memory:
                logged = used
                log.write(b"[memory: %d of %d bytes]\n" % (used, memory))
            time.sleep(_MEMORY_INTERVAL)


def _wait_for_scheduler(process: subprocess.Popen[bytes], deadline: float, cluster: _Cluster) -> None:
    """End the program if its cluster ends, or the scheduler's file does not appear until a deadline.

    The scheduler's session may be queued. If the cluster closes meanwhile, its folder disappears, and no
    scheduler starts. After the deadline, the program is connected to the scheduler, or has ended.
    """
    while process.poll() is None:
        names = _list(cluster.folder)
        is_met, is_late = cluster.scheduler_file in (names or ()), time.monotonic() > deadline
        if is_met and is_late:
            return
        # While the session waits, one look costs one list of the folder.
        is_doubtful = names is None or is_met or cluster.next_board in names
        if is_late:
            process.kill()  # which is a failure, as an interrupt is not
        elif is_doubtful and _why_over(cluster) is not None:
            _end(process)
        time.sleep(_STATE_INTERVAL if is_met else _POLL_INTERVAL)


def _give_signs(process: subprocess.Popen[bytes], cluster: _Cluster) -> None:
    """Date the file of a scheduler, which may be busy for minutes, while it runs. End it with its cluster.

    Dask may not close it, for example while it connects to a frozen worker.
    """
    n_over = 0
    while process.poll() is None and n_over < _PROOFS:
        time.sleep(_SIGN_INTERVAL)
        n_over = _give_sign(cluster, n_over)
    _end(process)


def _give_sign(cluster: _Cluster, n_over: int = 0) -> int:
    """Date the scheduler's file, unless its cluster is over. Return how often in a row it was found over."""
    why = _why_over(cluster)
    if why is None:
        with contextlib.suppress(OSError):
            os.utime(os.path.join(cluster.folder, str(cluster.scheduler_file)))
        return 0
    # A folder may seem not to exist for a moment, and a scheduler that closes needs some time.
    return _PROOFS if why == _REPLACED else n_over + 1


def _is_gone(folder: str) -> bool:
    """Return whether a folder has certainly been removed."""
    parent, name = os.path.split(folder)
    names = _list(parent)
    return names is not None and name not in names
