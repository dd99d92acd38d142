"""What sessions run, and their names: the code is run for real, by IPython as on the platform and Python."""

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from clusters import log_of, make
from distributed import Client
from distributed.security import Security

from dask_cml.layout import (
    FOLDER,
    LOGS_FOLDER,
    NUMBER,
    RECORD_FILE,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    board_file,
    scheduler_file,
)
from dask_cml.naming import DEFAULT_GROUP, GROUP_NAME, dask_names, read_name, session_name, session_of
from dask_cml.options import Options
from dask_cml.sessions.entry import Launch, file_name, parse
from dask_cml.sessions.plan import PRELOAD, Place, plan_scheduler, plan_worker
from dask_cml.worker import process

#: Text that shells, format strings and IPython each read something into.
NASTY = "a b'c\"d $HOME {1+1} {{x}} \\n \\ % ! ? é字"

#: Stands in for `python -m dask`: prints its arguments, and does what is in the file next to it.
PROGRAM = """\
#!{python}
import json, os, sys, time
print(json.dumps(sys.argv[1:]), flush=True)
exec(open(__file__ + '.more').read())
"""

#: Runs code as a kernel does, and tells its failure by the exit status.
IPYTHON = """\
import sys
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
sys.exit(not shell.run_cell(open(sys.argv[1], encoding='utf-8').read(), store_history=False).success)
"""

#: The id of a cluster's record.
RECORD = "0123456789abcdef"


@pytest.fixture
def folder(request, tmp_path):
    folder = tmp_path / getattr(request, "param", "plain")
    folder.mkdir()
    (folder / LOGS_FOLDER).mkdir()
    return folder


@pytest.fixture
def program(folder, monkeypatch):
    """Put a small program in Python's place, in a folder of the same name; return what makes it do more."""
    path = folder / "python"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    more = Path(f"{path}.more")
    more.touch()
    real = sys.executable
    monkeypatch.setattr("dask_cml.sessions.plan.sys", SimpleNamespace(executable=str(path)))
    assert sys.executable == real
    return more.write_text


@pytest.fixture
def run(request, tmp_path):
    """Run a plan's code and return what came out of it. It must be quick to end."""

    def run(plan, **environment):
        code = tmp_path / "session.py"  # not code.py, which IPython imports
        code.write_text(plan.code, encoding="utf-8")
        kernel = tmp_path / "kernel.py"
        kernel.write_text(IPYTHON)
        # Neither the current folder nor site-packages: a session's code must do without dask_cml.
        arguments = [kernel, code] if getattr(request, "param", None) else ["-I", "-S", code]
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "IPYTHONDIR": str(tmp_path), **plan.env, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def arguments(plan):
    lines = plan.log.read_text(errors="replace").splitlines()
    return next(json.loads(line) for line in lines if line.startswith('["'))


def values(argv, option):
    return [value for name, value in pairwise(argv) if name == option]


def recorded(folder):
    """The place of a session that enters itself into the record of its cluster."""
    for name in STARTED_FOLDER, SESSIONS_FOLDER:
        (folder / name).mkdir(exist_ok=True)
    return Place(folder, 0, RECORD)


def read(**options):
    return Options.read(**{"name": "mine", **options})


with_nasty_names = pytest.mark.parametrize("folder", ["plain", NASTY], ids=["plain", "nasty"], indirect=True)
in_ipython = pytest.mark.parametrize("run", ["ipython"], indirect=True)


@with_nasty_names
@in_ipython
def test_a_workers_arguments_arrive_unchanged_and_its_output_is_logged(program, run, folder):
    program("print('registered'); os.write(2, b'not UTF-8: \\xff\\n')")
    name = folder.name
    lines = f'{name}\n\t"""!ls'.replace("$", "")
    options = read(name=name, worker_class=name, worker_args=["--preload", lines], cpu=4, memory=8)
    plan = plan_worker(options, Place(folder), f"{name}-0", "tcp://10.0.0.1:8786")
    done = run(plan)
    assert done.returncode == 0, done.stderr + done.stdout
    expected = ["-m", "dask", "worker", "tcp://10.0.0.1:8786"]
    expected += ["--name", f"{name}-0", "--preload", "dask_cml.worker.process"]
    expected += ["--preload-nanny", "dask_cml.worker.process", "--nworkers", "1", "--nthreads", "4"]
    expected += ["--memory-limit", str(int(options.worker_memory * 2**30)), "--death-timeout", "600.0"]
    expected += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    expected += ["--worker-class", name, "--preload", lines]
    assert arguments(plan) == expected
    assert plan.log == folder / LOGS_FOLDER / f"{name}-0.log"
    logged = plan.log.read_bytes()
    assert b"registered\n" in logged
    assert b"not UTF-8: \xff\n" in logged
    assert logged.endswith(b"[dask worker exited with status 0]\n")
    assert (done.stdout, done.stderr) == ("", "")


@with_nasty_names
def test_the_schedulers_arguments_arrive_unchanged_with_its_own_sessions_port(
    program, run, folder, monkeypatch
):
    monkeypatch.setenv("CDSW_APP_PORT", "1111")
    name = folder.name
    options = read(name=name, scheduler_args=["--preload", name.replace("$", "")], idle_timeout="1 hour")
    plan = plan_scheduler(options, recorded(folder), "0.0.0.0", 8786)
    done = run(plan, CDSW_APP_PORT="8100", CDSW_READONLY_PORT="8200")
    assert done.returncode == 0, done.stderr + done.stdout
    expected = ["-m", "dask", "scheduler", "--host", "0.0.0.0", "--port", "8786"]
    expected += ["--idle-timeout", "3600.0 seconds", "--preload", PRELOAD, "--preload", name.replace("$", "")]
    expected += ["--dashboard-address", "127.0.0.1:8100"]
    assert arguments(plan) == expected
    assert plan.log == folder / LOGS_FOLDER / f"{name}-scheduler.log"


def test_an_argument_with_a_variable_that_is_not_set_starts_no_program(program, run, folder):
    program("print('registered')")
    options = read(worker_args=["--local-directory", "${NO_SUCH}/dask"])
    plan = plan_worker(options, Place(folder), "mine-0", "tcp://10.0.0.1:8786")
    done = run(plan)
    words = "dask worker not started: $NO_SUCH in its arguments is not set"
    assert done.returncode == 1
    assert words in done.stdout + done.stderr
    assert plan.log.read_text() == f"{words}\n[dask worker exited with status 127]\n"


@pytest.mark.parametrize("run", [None, pytest.param("ipython", marks=pytest.mark.slow)], indirect=True)
def test_the_code_of_a_session_fails_with_its_program_and_prints_the_last_lines(program, run, folder):
    for n, how in enumerate(["sys.exit(3)", "1 / 0", "os.kill(os.getpid(), 9)"]):
        program(f"print(*range(100_000), 'the last words', sep='\\n', flush=True); {how}")
        plan = plan_worker(read(), Place(folder), f"mine-{n}", "tcp://10.0.0.1:8786")
        done = run(plan)
        assert done.returncode == 1
        assert "worker failed with exit status" in done.stdout + done.stderr
        assert f"its log is {plan.log}" in done.stdout + done.stderr
        assert "the last words" in done.stdout
        assert "\n99900\n" not in done.stdout
        assert "\n99900\n" in plan.log.read_text()


@pytest.mark.slow
def test_a_worker_without_an_address_waits_for_a_scheduler_file(program, run, folder):
    program("time.sleep(600)")
    plan = plan_worker(read(scheduler_timeout=0.1, pending_timeout=0.1), Place(folder), "mine-0", None)
    done = run(plan)
    assert done.returncode == 1
    assert "exit status -9;" in done.stderr
    assert values(argv(plan), "--scheduler-file") == [str(folder / scheduler_file(0))]
    # It waits for one that is queued until the cluster is gone.
    cluster = folder / "cluster"
    cluster.mkdir()
    program(f"time.sleep(1); os.rmdir({str(cluster)!r}); time.sleep(600)")
    options = read(scheduler_timeout=0.1, pending_timeout=900, log_directory=str(folder / "logs"))
    queued = plan_worker(options, Place(cluster), "mine-0", None)
    assert run(queued).returncode == 0
    assert values(argv(queued), "--death-timeout") == ["1500.1"]
    # It runs on once there is one.
    (folder / scheduler_file(0)).touch()
    program("time.sleep(1); print('runs on')")
    assert run(plan).returncode == 0
    assert "runs on" in plan.log.read_text()


@pytest.mark.parametrize("address", [None, "tcp://10.0.0.1:8786"])
def test_a_session_whose_cluster_has_ended_exits_at_once(program, run, folder, address):
    place = recorded(folder)
    for file, content, why in (
        (scheduler_file(0), '{"closed": "idle for 5 s"}', "its cluster has ended: idle for 5 s"),
        (board_file(1), "{}", "another scheduler replaces its scheduler"),
        (RECORD_FILE, '{"id": "fedcba9876543210"}', "another cluster has the name of its cluster"),
    ):
        (folder / file).write_text(content)
        plan = plan_worker(read(), place, "mine-0", address)
        done = run(plan)
        assert (done.returncode, done.stdout) == (0, f"dask worker not started: {why}\n")
        assert not plan.log.exists()
        assert [*(folder / STARTED_FOLDER).iterdir()] == [*(folder / SESSIONS_FOLDER).iterdir()] == []
        (folder / file).unlink()


def test_a_session_runs_if_files_do_not_prove_that_its_cluster_has_ended(program, run, folder):
    place = recorded(folder)
    (folder / board_file(0)).touch()
    for n, content in enumerate(["", "{", "[]", '{"closed": null, "id": null}', "[" * 100_000]):
        for file in scheduler_file(0), RECORD_FILE:
            (folder / file).write_text(content)
        plan = plan_worker(read(), place, f"mine-{n}", None)
        assert run(plan).returncode == 0
        # The session was queued for long: its scheduler need not start any more.
        assert values(arguments(plan), "--death-timeout")[-1] == str(read().worker_timeout)


def test_a_log_goes_on_when_the_disk_is_not_full_any_more(program, run, folder):
    log = folder / LOGS_FOLDER / "mine-0.log"
    log.symlink_to("/dev/full")  # every write fails for lack of space
    program(f"print('x' * 10**6, flush=True); os.unlink({str(log)!r}); print('there is space')")
    done = run(plan_worker(read(), Place(folder), "mine-0", "tcp://10.0.0.1:8786"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, missing, *_, last, end = log.read_text().splitlines()
    assert (first, last, end) == ("", "there is space", "[dask worker exited with status 0]")
    lost = re.fullmatch(r"\[(\d+) bytes of output lost: the log could not be written\]", missing)
    assert int(lost[1]) > 10**5


def entries(folder):
    return sorted(path.name for path in (folder / SESSIONS_FOLDER).iterdir())


@with_nasty_names
def test_of_two_sessions_with_one_name_the_second_ends_at_once(program, run, folder):
    plan = plan_worker(read(), recorded(folder), "mine-0", "tcp://10.0.0.1:8786")
    assert run(plan, CDSW_ENGINE_ID="first", CDSW_MASTER_ID="owner").stdout == ""
    program("1 / 0")
    second = run(plan, CDSW_ENGINE_ID="second", CDSW_MASTER_ID="owner")
    assert second.returncode == 0
    assert second.stdout == "dask worker not started: another session has its name\n"
    assert (folder / STARTED_FOLDER / "mine-0").read_text() == "first"
    assert [name.split(",")[0] for name in entries(folder)] == ["first"]


def test_a_session_that_its_launcher_did_not_enter_into_the_record_enters_itself(program, run, folder):
    options, place = read(cpu=4, memory=16), recorded(folder)
    session = {"CDSW_ENGINE_ID": "abcdefgh12345678", "CDSW_MASTER_ID": "ijklmnop12345678"}
    before = int(time.time())
    run(plan_worker(options, place, "mine-0", None), **session)
    [launch] = [parse(name, "mine") for name in entries(folder)]
    assert (launch.id, launch.key, launch.owner) == ("abcdefgh12345678", "mine-0", "ijklmnop12345678")
    assert (launch.size, launch.launched >= before) == (options.worker, True)
    # The launcher wrote it as soon as it had launched it.
    known = file_name(Launch("qrstuvwx12345678", "mine-1", "ijklmnop12345678", before, None), "mine")
    (folder / SESSIONS_FOLDER / known).touch()
    run(plan_worker(options, place, "mine-1", None), **{**session, "CDSW_ENGINE_ID": "qrstuvwx12345678"})
    assert len(entries(folder)) == 2
    assert known in entries(folder)


def argv(plan):
    """The command of a plan as its code has it."""
    [session] = [node.value for node in ast.parse(plan.code).body if isinstance(node, ast.Assign)]
    return ast.literal_eval(session)["command"]


def test_dask_cuda_gets_the_arguments_that_it_takes(tmp_path):
    options = read(
        cpu=4, memory=16, memory_reserve=0, nvidia_gpu=2, worker_command=["dask", "cuda", "worker"]
    )
    command = argv(plan_worker(options, Place(tmp_path), "mine-0", "tls://10.0.0.1:8786"))
    assert command[:6] == [sys.executable, "-m", "dask", "cuda", "worker", "tls://10.0.0.1:8786"]
    assert "--nworkers" not in command
    assert "--preload-nanny" not in command
    assert values(command, "--nthreads") == ["2"]
    assert values(command, "--memory-limit") == [str(8 * 2**30)]
    assert values(command, "--resources") == ["GPU=1"]


@pytest.mark.cuda
def test_dask_cudas_own_parser_takes_the_arguments(tmp_path):
    from dask_cuda import cli

    options = read(nvidia_gpu=2, worker_command=["dask", "cuda", "worker"], security=True)
    for name in "ca", "worker_cert", "worker_key":
        (tmp_path / f"{name}.pem").touch()
    keys = Security(
        require_encryption=True,
        tls_ca_file=str(tmp_path / "ca.pem"),
        tls_worker_cert=str(tmp_path / "worker_cert.pem"),
        tls_worker_key=str(tmp_path / "worker_key.pem"),
    )
    for address in "tls://10.0.0.1:8786", None:
        command = argv(plan_worker(options, Place(tmp_path, security=keys), "mine-0", address))
        parsed = cli.worker.make_context("dask cuda worker", command[5:]).params
        assert (parsed["scheduler"], parsed["name"], parsed["nthreads"]) == (address, "mine-0", 1)
        assert (parsed["resources"], parsed["dashboard"]) == ("GPU=1", False)
        assert parsed["preload"] == ("dask_cml.worker.process",)
        assert not parsed["preload_argv"]


def test_a_plan_has_the_size_and_environment_of_its_role(tmp_path):
    text = NASTY.replace("$HOME", "")
    sizes = {"cpu": 4, "memory": 16, "nvidia_gpu": 1, "scheduler_cpu": 2, "scheduler_memory": 8}
    options = read(**sizes, env={"A": text})
    worker = plan_worker(options, Place(tmp_path), "mine-0", None)
    scheduler = plan_scheduler(options, Place(tmp_path), "0.0.0.0", 8786)
    assert (worker.size, scheduler.size) == (options.worker, options.scheduler)
    assert worker.env["A"] == scheduler.env["A"] == text
    assert "--idle-timeout" not in argv(scheduler)
    # Without a record, the scheduler writes the file that its workers read.
    assert values(argv(scheduler), "--scheduler-file") == [str(tmp_path / scheduler_file(0))]
    assert values(argv(scheduler), "--preload") == [PRELOAD]
    assert not {FOLDER, NUMBER} & scheduler.env.keys()
    # The user's environment goes over our own.
    assert worker.env["PYTHONUNBUFFERED"] == "1"
    mine = {"A": text, "PYTHONUNBUFFERED": "", "DASK_DISTRIBUTED__WORKER__MEMORY__MAX_SPILL": "1"}
    changed = plan_worker(read(**sizes, env=mine), Place(tmp_path), "mine-0", None)
    assert changed.env == {**worker.env, **mine}


def test_a_variable_for_spark_holds_no_session_back(tmp_path, monkeypatch):
    name = "ENV_DISABLE_GANG_SCHEDULER"

    def found(**options):
        place = Place(tmp_path)
        worker = plan_worker(read(**options), place, "mine-0", None)
        scheduler = plan_scheduler(read(**options), place, "0.0.0.0", 8786)
        return worker.env.get(name), scheduler.env.get(name)

    monkeypatch.delenv("ENV_GANG_MIN_MEMBER", raising=False)
    assert found() == (None, None)
    monkeypatch.setenv("ENV_GANG_MIN_MEMBER", "3")
    assert found() == ("true", "true")
    assert found(env={name: "false"}) == ("false", "false")


def test_a_plan_as_text_shows_size_code_and_names_of_variables(tmp_path):
    options = read(cpu=4, memory=16, env={"TOKEN": "s3cr3t"}, launch_options={"key": "s3cr3t"})
    plan = plan_worker(options, Place(tmp_path), "mine-0", None)
    assert plan.env["TOKEN"] == "s3cr3t"
    text = str(plan)
    assert text.startswith("# mine-0: cpu=4 memory=16 nvidia_gpu=0\n")
    assert "# env TOKEN=(hidden)\n" in text
    assert "# env PYTHONUNBUFFERED=(hidden)\n" in text
    assert text.endswith(plan.code)
    compile(text, "session", "exec")
    assert "s3cr3t" not in f"{plan} {plan!r} {options!r}"


CLUSTERS = ("mine", "mine-gpu", "mine-0", "a b", "ü-1")
GROUPS = (DEFAULT_GROUP, "gpu", "big-memory", "g2", "A_b-c", "gpu-1", "gpu-1-0", "a-2b-c-3")


@pytest.mark.parametrize("processes", [1, 2, 12])
def test_names_of_workers_say_their_group_and_number(processes):
    for cluster, group, number in product(CLUSTERS, GROUPS, (*range(13), 1234)):
        session = session_name(cluster, group, number)
        for name in {session, *dask_names(session, processes)}:
            assert read_name(cluster, name) == (group, number)


async def test_a_dask_worker_repeats_the_name_and_group_of_its_session_and_else_its_own_name_says_them(
    tmp_path, monkeypatch
):
    plan = plan_worker(read(), Place(tmp_path), "a-w0", None, "gpu")
    for name, value in plan.env.items():
        monkeypatch.setenv(name, value)
    assert session_of("mine", "a-w0-1", await process._about(None)) == ("gpu", "a-w0")
    about = {"name": "mine-gpu-0", "group": "default"}
    assert session_of("mine", "mine-gpu-0", about) == ("default", "mine-gpu-0")
    assert session_of("mine", "mine-gpu.1-0-3", {"session": None}) == ("gpu-1", "mine-gpu.1-0")
    assert session_of("mine", "a-w0", {"name": "a-w0"}) == ("default", "a-w0")
    assert session_of("mine", "a-w0", None) is None


def test_no_other_name_is_that_of_a_session_or_of_a_group():
    sessions = "mine mine- mine-gpu mine-scheduler other-0 mine-0-1-2 mine--0 mine-scheduler-0 mine-default-0"
    assert not any(read_name("mine", name) for name in ["", *sessions.split()])
    groups = ["", "0", "0gpu", "gpu.0", "gpu-", "-gpu", "g p", "gpü", "gpu\n", "a/b"]
    assert not any(map(GROUP_NAME.fullmatch, groups))


#: Starts as many Dask workers as there are GPUs, with dask-cuda's arguments and names. Their nannies preload
#: what Dask's configuration says.
DASK_CUDA_WORKER = """\
#!{python}
import os, sys
sys.path[0] = os.getcwd()  # as `python -m dask` does
from distributed.cli import dask_worker

class Nanny(dask_worker.Nanny):
    def __init__(self, *args, preload_nanny, **options):
        super().__init__(*args, **options)

if __name__ == "__main__":
    dask_worker.Nanny = Nanny
    dask_worker.main([*sys.argv[1:], "--nworkers", "2"])
"""


def test_gpus_are_counted_by_nvidia_smi_or_by_their_devices_without_it(nvidia_smi, monkeypatch, tmp_path):
    nvidia_smi(3)
    assert process.count_gpus() == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(process, "_DEVICES", devices)
    assert process.count_gpus() == 0
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (devices / device).touch()
    assert process.count_gpus() == 2


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"nvidia_gpu": 2, "processes": 2}, ["dask", "cuda", "worker"]),
        ({"nvidia_gpu": 1}, ["dask", "cuda", "worker"]),
        ({}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "processes": 1}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "worker_args": ["--lifetime", "1 hour"]}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "worker_command": ["dask", "worker"]}, ["dask", "worker"]),
    ],
)
def test_dask_cuda_runs_the_workers_if_it_is_installed(tmp_path, monkeypatch, options, command):
    (tmp_path / "dask_cuda.py").write_text("raise ImportError")  # nobody imports it
    monkeypatch.syspath_prepend(tmp_path)
    code = plan_worker(read(**options), Place(tmp_path), "mine-0", "tcp://x:1").code
    expected = [sys.executable, "-m", *command, "tcp://x:1", "--name", "mine-0"]
    assert f"'command': {expected!r}"[:-1] in code
    is_dask_cuda = "cuda" in command
    assert ("--nworkers" in code) != is_dask_cuda
    assert ("--preload-nanny" in code) != is_dask_cuda


@pytest.mark.slow
async def test_dask_cuda_gives_tasks_their_gpu_and_moves_data_before_its_session_stops(
    platform, tmp_path, holds
):
    program = tmp_path / "dask-cuda-worker"
    program.write_text(DASK_CUDA_WORKER.format(python=sys.executable))
    program.chmod(0o755)
    platform.configure(stop_grace=30)
    async with (
        make(name="mine", n_workers=1, cpu=2, nvidia_gpu=2, worker_command=[str(program)]) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        workers = cluster.scheduler_info["workers"].values()
        assert {worker["name"] for worker in workers} == {"mine-0-0", "mine-0-1"}
        assert [worker["resources"] for worker in workers] == [{"GPU": 1}, {"GPU": 1}]
        await holds(lambda: cluster.n_pending == 0)
        assert await client.submit(sum, [1, 2], resources={"GPU": 1}) == 3
        with dask.annotate(resources={"GPU": 1}):
            task = dask.delayed(sum)([1, 2, 3])
        assert await client.compute(task, optimize_graph=False) == 6
        other = client.submit(sum, [1], resources={"FPGA": 1}, pure=False)
        while await client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.unrunnable)) != 1:
            await asyncio.sleep(0.1)
        assert other.status == "pending"
        # Clusters that tasks start are none of dask-cml's.
        preloads = await client.run(lambda: dask.config.get("distributed.nanny.preload"))
        assert [*preloads.values()] == [[], []]
        [session] = [session.id for session in cluster.sessions if session.role == "worker"]
        await asyncio.to_thread(platform.evict, session, notice=True)
        await holds(lambda: "Worker mine-0" in log_of(cluster))
        assert "Worker mine-0 evicted, with notice; launching a replacement" in log_of(cluster)
