"""The table of all options, which the command line, the form of the web UI and the documentation read.

After a change, ``python docs/write_options.py`` writes ``cml.yaml`` and ``cml-schema.yaml``.
"""

from __future__ import annotations

from dataclasses import replace

from dask_cml import checks
from dask_cml.options.option import Argument, Option

#: Maximum number of worker sessions.
MOST_SESSIONS = 100_000

#: The options by the headings above them.
_TABLE: dict[str, tuple[Option, ...]] = {
    "One worker session": (
        Argument(
            "n-workers",
            "Worker sessions",
            checks.integer,
            0,
            "Number of worker sessions to launch at first.",
            least=0,
            most=MOST_SESSIONS,
            elsewhere=("num_workers", "workers", "n_jobs", "jobs"),
            is_grouped=True,
        ),
        Argument(
            "cpu",
            "CPUs",
            checks.positive,
            1,
            "Virtual CPUs of one worker session, such as 4 or 0.5.",
            elsewhere=("cores", "cpus", "worker_cpu", "worker_cores"),
            is_grouped=True,
        ),
        Argument(
            "memory",
            "Memory",
            checks.gibibytes,
            2,
            'Memory of one worker session, in GiB, or a string such as "16 GiB".',
            most=checks.MOST_GIB_OF_SESSION,
            elsewhere=("memory_limit", "worker_memory", "worker_mem"),
            is_grouped=True,
        ),
        Argument(
            "nvidia-gpu",
            "GPUs",
            checks.integer,
            0,
            "Number of GPUs of one worker session.",
            least=0,
            elsewhere=("gpu", "gpus", "n_gpus", "worker_gpu", "worker_gpus"),
            is_grouped=True,
        ),
        Argument(
            "nthreads",
            "Threads",
            checks.threads,
            None,
            "Number of threads of one worker session, shared evenly by its processes. By default one per "
            "whole CPU, rounded down to a multiple of `processes`, and at least one per process.",
            least=1,
            needs=("cpu", "processes"),
            elsewhere=("cores", "threads", "threads_per_worker", "worker_nthreads", "worker_threads"),
            is_grouped=True,
        ),
        Argument(
            "processes",
            "Processes",
            checks.processes,
            None,
            "Number of Dask worker processes in one worker session. They share its threads, memory and "
            "resources evenly. By default one per GPU, or 1 without GPUs.",
            least=1,
            needs=("nvidia_gpu", "worker_command"),
            elsewhere=("nworkers", "nprocs"),
            is_grouped=True,
        ),
        Argument(
            "resources",
            "Resources",
            checks.resources,
            None,
            "Resources of one worker session for tasks that ask for them, such as `GPU=1`. Its Dask workers "
            "share them evenly. By default the session's GPUs, as `GPU`.",
            needs=("nvidia_gpu",),
            is_grouped=True,
        ),
        Argument(
            "memory-reserve",
            "Reserved memory",
            checks.memory_reserve,
            None,
            "Memory of a worker session that its Dask workers leave to other processes, in GiB, or a string "
            'such as "500 MiB". By default 0.25 GiB plus 2 % of the memory, but at most half of the memory.',
            needs=("memory",),
            is_grouped=True,
        ),
        Argument(
            "scratch",
            "Scratch space",
            checks.gibibytes_or_none,
            "10 GB",
            'Local disk of one worker session, in GiB, or a string such as "50 GB". Its Dask workers spill '
            'at most 80 % of it, unless Dask\'s `distributed.worker.memory.max-spill` is set. "none" means '
            "unlimited. CML's own default is 10 GB.",
            most=checks.MOST_GIB_OF_SESSION,
            is_grouped=True,
        ),
        Argument(
            "worker-command",
            "Worker command",
            checks.worker_command,
            [],
            "Command that starts the Dask workers of a session, `dask cuda worker` or one with the arguments "
            "of `dask worker`. By default `dask worker`. If dask-cuda is installed, sessions with one "
            "process per GPU run `dask cuda worker`, unless `worker-args` is set.",
            needs=("nvidia_gpu",),
            is_grouped=True,
            is_secret=True,
        ),
        Argument(
            "worker-class",
            "Worker class",
            checks.text,
            None,
            "Class of the Dask workers, as in `dask worker --worker-class`, such as `my_package.MyWorker`. "
            "By default Dask's own.",
            is_grouped=True,
        ),
        Argument(
            "worker-args",
            "Worker arguments",
            checks.worker_args,
            [],
            "Additional command-line arguments of `dask worker`. Sessions expand `$NAME` and `~` in them.",
            needs=("processes", "worker_command"),
            elsewhere=(
                "worker_extra_args",
                "extra",
                "worker_options",
                "worker_kwargs",
                "local_directory",
                "nanny",
            ),
            refused={
                "the cluster sets it": ("--scheduler-file",),
                "each session has its own address": ("--host", "--listen-address", "--contact-address"),
                "use the argument worker_timeout": ("--death-timeout",),
                "use the argument memory": ("--memory-limit",),
                "use the argument name": ("--name",),
                "use the argument nthreads": ("--nthreads",),
                "use the argument processes": ("--nworkers",),
                "use the argument resources": ("--resources",),
                "use the argument worker_class": ("--worker-class",),
                "use the argument security": ("--protocol", "--tls-ca-file", "--tls-cert", "--tls-key"),
                "the program would end": ("--version", "--help", "-h"),
            },
            is_grouped=True,
            is_secret=True,
        ),
        Argument(
            "launch-options",
            "Launch options",
            checks.launch_parameters,
            {},
            "Additional parameters of CML's `launch_workers` for a worker session, such as "
            "`accelerator_label_id`. `accelerator_label` and `rdma_network` choose GPUs and networks by "
            "name. The cluster refuses parameters that the installed release of CML does not support.",
            elsewhere=("account", "custom_cluster_spec", "job_extra_directives", "queue"),
            refused={
                "the cluster sets it": ("code", "script"),
                "use the argument cpu": ("cpu",),
                "use the argument memory": ("memory",),
                "use the argument nvidia_gpu": ("nvidia_gpu",),
                "use the argument env": ("env",),
                "use the argument n_workers": ("n",),
                "use the argument name": ("name",),
            },
            is_grouped=True,
            is_secret=True,
        ),
        Argument(
            "worker-groups",
            "Worker groups",
            checks.worker_groups,
            {},
            'Additional groups of worker sessions, by name, such as `{"gpu": {"n-workers": 2, "nvidia-gpu": '
            "1}}`. A group can set `n-workers`, `cpu`, `memory`, `nvidia-gpu`, `memory-reserve`, `scratch`, "
            "`nthreads`, `processes`, `resources`, `worker-class`, `worker-command`, `worker-args`, "
            "`launch-options` and `env`. It takes all other options from the cluster.",
            is_secret=True,
            is_recorded=False,
        ),
    ),
    "The scheduler's session": (
        Argument(
            "scheduler-cpu",
            "Scheduler CPUs",
            checks.positive,
            1,
            "Virtual CPUs of the scheduler's session, such as 2 or 0.5.",
        ),
        Argument(
            "scheduler-memory",
            "Scheduler memory",
            checks.gibibytes,
            2,
            'Memory of the scheduler\'s session, in GiB, or a string such as "4 GiB".',
            most=checks.MOST_GIB_OF_SESSION,
            elsewhere=("scheduler_mem",),
        ),
        Argument(
            "scheduler-nvidia-gpu",
            "Scheduler GPUs",
            checks.integer,
            0,
            "Number of GPUs of the scheduler's session.",
            least=0,
        ),
        Argument(
            "scheduler-args",
            "Scheduler arguments",
            checks.scheduler_args,
            [],
            "Additional command-line arguments of `dask scheduler`. The session expands `$NAME` and `~` in "
            "them.",
            elsewhere=("scheduler_kwargs", "scheduler_options", "scheduler_extra_args", "jupyter"),
            refused={
                "the cluster sets it": ("--dashboard-address", "--host", "--port", "--scheduler-file"),
                "the cluster sets --host": ("--interface",),
                "use the argument idle_timeout": ("--idle-timeout",),
                "use the argument security": ("--protocol", "--tls-ca-file", "--tls-cert", "--tls-key"),
                "the program would end": ("--version", "--help", "-h"),
            },
            is_secret=True,
        ),
        Argument(
            "scheduler-launch-options",
            "Scheduler launch options",
            checks.launch_parameters,
            {},
            "Additional parameters of CML's `launch_workers` for the scheduler's session, checked like "
            "`launch-options`.",
            refused={
                "the cluster sets it": ("code", "script", "n"),
                "use the argument scheduler_cpu": ("cpu",),
                "use the argument scheduler_memory": ("memory",),
                "use the argument scheduler_nvidia_gpu": ("nvidia_gpu",),
                "use the argument env": ("env",),
                "use the argument name": ("name",),
            },
            is_secret=True,
        ),
    ),
    "Every session": (
        Argument(
            "env",
            "Environment variables",
            checks.environment,
            {},
            "Environment variables of all sessions, which expand `$NAME` and `~` in them.",
            elsewhere=("env_vars", "environ", "environment", "job_script_prologue"),
            is_grouped=True,
            is_secret=True,
        ),
        Option(
            "inherit",
            "Inherited configuration",
            checks.sections,
            [],
            'Top-level sections of Dask\'s configuration that all sessions inherit, such as `["sql"]`, in '
            "addition to Dask's own. Tasks can read their values, and the cluster's folder contains them.",
            has_flag=True,
        ),
        Argument(
            "log-directory",
            "Log folder",
            checks.folder,
            None,
            "Folder on the project file system for the sessions' logs, which stay there, with a subfolder "
            "per cluster. By default a folder of the cluster, which the cluster removes when it shuts down.",
        ),
    ),
    "The cluster": (
        Argument(
            "name",
            "Name",
            checks.cluster_name,
            None,
            "Name of the cluster, unique among the project's running clusters. By default a random name.",
            needs=("create_mode",),
            is_recorded=False,
        ),
        Argument(
            "create-mode",
            "Create mode",
            checks.choice,
            "create",
            "Whether to create a cluster or connect to a running one. `create` fails if a cluster with this "
            "name runs. `connect` fails if none runs. `create-or-connect` connects if one runs, and creates "
            "one otherwise. Connecting does not change the options of a running cluster.",
            choices=("create", "connect", "create-or-connect"),
            is_recorded=False,
            has_flag=False,  # the command and the form create
        ),
        Argument(
            "security",
            "Encryption",
            checks.security,
            True,
            "Whether connections are encrypted and require the cluster's keys. If false, any client that "
            "reaches the scheduler can connect.",
            is_recorded=False,
        ),
        Argument(
            "pending-timeout",
            "Time limit in the queue",
            checks.seconds,
            "15 minutes",
            "Time limit for the scheduler's session to leave the queue and start. After that, the start "
            "fails. Worker sessions have no such limit.",
            elsewhere=("resource_timeout",),
        ),
        Argument(
            "scheduler-timeout",
            "Time limit of the scheduler's start",
            checks.seconds,
            "90s",
            "Time limit for the scheduler to answer after its session runs. After that, the start fails.",
        ),
        Argument(
            "worker-timeout",
            "Time limit of a worker's start",
            checks.seconds,
            "10 minutes",
            "Time limit for a worker to connect after its session runs. After that, the cluster replaces the "
            "session.",
            elsewhere=("death_timeout",),
        ),
        Option(
            "failure-limit",
            "Failure limit",
            checks.integer,
            5,
            "Number of worker failures in a row after which the cluster launches no replacements, until the "
            "next `scale()` or `adapt()`.",
            least=1,
        ),
        Option(
            "scheduler-restarts",
            "Scheduler restarts",
            checks.integer,
            3,
            "How many schedulers in a row may replace a lost one before the cluster ends. A completed task "
            "resets the count. With 0, the cluster ends with its scheduler.",
            least=0,
        ),
        Option(
            "quota-retry",
            "Pause after a refusal",
            checks.seconds,
            "60s",
            "How long the cluster waits after CML refuses a session before it asks for another. Adaptive "
            "scaling stops asking for more sessions while some have been queued for this long.",
        ),
        Option(
            "retire-timeout",
            "Time limit of a retirement",
            checks.seconds,
            "2 minutes",
            "How long a worker that is moving its data may be silent before the cluster stops its session.",
        ),
        Argument(
            "idle-timeout",
            "Idle timeout",
            checks.seconds_or_none,
            None,
            "Idle time after which the cluster shuts down. By default never.",
        ),
        Argument(
            "orphan-timeout",
            "Orphan timeout",
            checks.seconds_or_none,
            "5 minutes",
            "Time after which a cluster shuts down that no client and no process uses. Ignored with "
            "`shutdown-on-close: false`.",
            has_flag=False,  # such a cluster runs on without its creator
        ),
        Argument(
            "shutdown-on-close",
            "Shutdown on close",
            checks.boolean,
            True,
            "Whether to stop all sessions when the cluster object is closed or its process exits. If false, "
            "the cluster runs on. An object that connects to a running cluster leaves it running, unless the "
            "argument `shutdown_on_close=True` is given.",
            is_recorded=False,
            has_flag=False,  # the command lets it run on, and the web UI stops it
        ),
        Argument(
            "forward-dashboard",
            "Dashboard forwarding",
            checks.boolean,
            False,
            "Whether to serve the dashboard on a local port, to which `dashboard_link` then points. For "
            "programs that cannot log in to CML, such as JupyterLab.",
            elsewhere=("scheduler_forward_port",),
            is_recorded=False,
            has_flag=False,  # the port would close with the command
        ),
        Option(
            "forward-hosts",
            "Hosts of proxies",
            checks.names,
            [],
            "Host names of proxies through which browsers reach the forwarded dashboard, such as "
            '`["hub.example.com"]`. The port refuses requests for other hosts, except for this machine and, '
            "in a CML session, for CML's hosts.",
        ),
        Option(
            "state-directory",
            "State folder",
            checks.folder,
            "~/.dask-cml",
            "Folder for the files of all clusters, such as their keys and logs. All sessions of the project "
            "must share it.",
        ),
    ),
    "The web UI": (
        Option(
            "serve.users",
            "",
            checks.names,
            None,
            'Names of the CML users who may change clusters in the web UI, such as `["ann"]`. Others only '
            "view them. By default, all users to whom CML grants write access. Users with the web UI's token "
            "may always change clusters.",
        ),
    ),
    "History and prices": (
        Option(
            "history.keep",
            "",
            checks.integer,
            500,
            "Maximum number of ended clusters in the project's history. 0 means no history.",
            least=0,
        ),
        Option(
            "history.days",
            "",
            checks.integer,
            90,
            "Number of days for which an ended cluster stays in the project's history.",
            least=1,
        ),
        Option(
            "history.logs",
            "",
            checks.gibibytes_or_none,
            "200 MB",
            'Maximum size of the logs of ended clusters in the history, in GiB, or a string such as "1 GB". '
            '"none" stores no logs. Logs in a `log-directory` stay there, and do not count.',
        ),
        Option(
            "prices.cpu",
            "",
            checks.positive,
            None,
            "Price of a virtual CPU per hour, in any currency. By default, hours have no cost.",
        ),
        Option(
            "prices.memory",
            "",
            checks.positive,
            None,
            "Price of a GiB of memory per hour.",
        ),
        Option(
            "prices.gpu",
            "",
            checks.positive,
            None,
            "Price of a GPU per hour.",
        ),
    ),
    "Limits of a site": (
        Option(
            "limits.sessions",
            "",
            checks.integer,
            None,
            "Maximum number of sessions per cluster, including the scheduler's. By default unlimited.",
            least=1,
        ),
        Option(
            "limits.cpu",
            "",
            checks.positive,
            None,
            "Maximum virtual CPUs of all sessions of a cluster. By default unlimited.",
        ),
        Option(
            "limits.memory",
            "",
            checks.gibibytes,
            None,
            'Maximum memory of all sessions of a cluster, in GiB, or a string such as "1 TiB". By default '
            "unlimited.",
        ),
        Option(
            "limits.gpu",
            "",
            checks.integer,
            None,
            "Maximum number of GPUs of all sessions of a cluster. By default unlimited.",
            least=0,
        ),
        Option(
            "limits.hours",
            "",
            checks.positive,
            None,
            "Hours from its creation after which a cluster shuts down. The limit in its creator's "
            "configuration counts. By default unlimited.",
            has_flag=True,
        ),
    ),
    "The platform": (
        Argument(
            "platform",
            "Platform",
            checks.choice,
            "auto",
            "Platform that launches sessions. `auto` is CML: `cml.workers_v1` or, if that is missing, "
            "`cdsw`. `local` runs sessions as processes of this machine, for laptops and tests.",
            choices=("auto", "local"),
        ),
        Option(
            "api.threads",
            "",
            checks.integer,
            16,
            "Maximum number of concurrent calls of one function of the Workers API.",
            least=1,
        ),
        Option(
            "api.poll-interval",
            "",
            checks.seconds,
            "1s",
            "Minimum time between two calls of `list_workers`.",
        ),
        Option(
            "api.watch-interval",
            "",
            checks.seconds,
            "10s",
            "Time between two calls of `list_workers` while all workers are connected.",
        ),
        Option(
            "api.retries",
            "",
            checks.integer,
            6,
            "Maximum number of retries, with growing pauses, after a call fails or times out. Refused "
            "launches are not retried.",
            least=0,
        ),
        Option(
            "api.timeout",
            "",
            checks.seconds,
            "30s",
            "Time limit of one call. The cluster abandons a slower call, and tries again. If the API does "
            "not answer, `close()` takes about this long.",
        ),
    ),
}

#: What the sections of the configuration are for.
SECTIONS = {
    "serve": "The web UI of `dask cml serve`.",
    "history": "The history of ended clusters.",
    "prices": "Prices of the site, from which the cost of clusters is calculated.",
    "limits": "Limits that catch costly mistakes. Users can raise them. Only CML's quotas are binding.",
    "api": "Settings for calls of the Workers API.",
}
#: All options by their keys below ``cml``.
OPTIONS: dict[str, Option] = {
    option.key: replace(option, heading=heading) for heading, options in _TABLE.items() for option in options
}
#: The options that are arguments of CMLCluster, by name, in the order of its signature.
ARGUMENTS: dict[str, Argument] = {
    option.name: option for option in OPTIONS.values() if isinstance(option, Argument)
}
#: The names of the options that a worker group can set.
GROUP_OPTIONS = tuple(name for name, argument in ARGUMENTS.items() if argument.is_grouped)
