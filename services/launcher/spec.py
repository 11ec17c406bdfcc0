"""The processes of one host: their ports and health checks, and which of them are forked instead of started."""

import os
import sys
from dataclasses import dataclass, field, replace

from gateway.settings import GatewaySettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.devices import Assignment
from services.launcher.ports import PortUse
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

OURS = "POLYPHASE_"  # the prefix of our variables
CONTROL = "control"  # the process that `one_process` starts
_CONTROL_MODULE = "services.control"
# The modules that the fork server imports for each module that it forks, and the environment for these imports.
_PRELOAD = {
    "gateway": ("gateway.app", "shared.runtime.http"),
    _CONTROL_MODULE: ("gateway.app", "services.cluster_monitor.app", "services.global_scheduler.app"),
    "services.worker": ("services.worker.app", "services.worker.engines.vllm", "services.worker.kv.vllm.connector"),
}
# What `services.worker` sets before it imports these modules counts for a forked process only if it is set here:
# PyTorch decides at the import whether a decorated function of vLLM will be compiled.
_PRELOAD_ENV = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep running. `health_url` answers 200 once it is ready; empty: it is ready when it runs.

    A process with a `module` can be forked from one that has imported the engine; see `fork_server`.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    health_url: str = ""
    ports: tuple[PortUse, ...] = ()
    module: str = ""
    settings: ServiceSettings | None = None  # the settings in `env`; None: not one of our services
    start_s: float = 0.0  # time limit of its start; 0: that of any process
    # may_be_late: the suite serves without it if its start exceeds the limit. role: of which one process on this host
    # must be ready; empty: none, since other hosts may have one.
    may_be_late: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of one host and the addresses of the whole suite. one_process: as in the cluster file."""

    model: str
    processes: tuple[ProcessSpec, ...]
    instance_ids: tuple[str, ...]  # of this host
    api_url: str
    monitor_url: str
    scheduler_urls: tuple[str, ...]
    predictor_url: str
    dashboard_url: str
    runs_control: bool
    planner_url: str = ""
    gateway_urls: tuple[str, ...] = ()  # of each gateway process alone; of a single one: `api_url`
    api_keys: bool = False  # whether the API requires a key
    devices: Assignment = field(default_factory=Assignment)  # of instances that this launcher places
    one_process: bool = False

    @property
    def started(self) -> tuple[ProcessSpec, ...]:
        """The processes as they are started: with `one_process` gateway, scheduler and monitor are one."""
        if not (self.one_process and self.runs_control):
            return self.processes
        joined = {type(each.settings): each for each in self.processes}
        gateway, monitor = joined[GatewaySettings], joined[MonitorSettings]
        parts = (monitor, joined[SchedulerSettings], gateway)
        control = replace(
            gateway,
            name=CONTROL,
            argv=(*gateway.argv[:-1], _CONTROL_MODULE),
            env={name: value for part in parts for name, value in part.env.items()},
            ports=tuple(use for part in parts for use in part.ports),
            module=_CONTROL_MODULE if gateway.module else "",
        )
        return tuple(control if each is monitor else each for each in self.processes if each not in parts[1:])

    @property
    def fork_env(self) -> dict[str, str] | None:
        """The fork server's environment; None if nothing is, or can be, forked.

        A fork server pays off for a single gateway, too: a lost one is back within two seconds.
        """
        forked = [process for process in self.started if process.module]
        if not forked or sys.platform != "linux":
            return None
        shared = {key: value for key, value in forked[0].env.items() if not key.startswith(OURS)}
        return {**shared, **_PRELOAD_ENV}

    @property
    def start_s(self) -> float:
        """The longest time limit of an instance's start."""
        return max((each.start_s for each in self.processes if each.may_be_late), default=0.0)

    @property
    def preload(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for process in self.started for name in _PRELOAD.get(process.module, ())))

    @property
    def port_uses(self) -> tuple[PortUse, ...]:
        return tuple(use for process in self.processes for use in process.ports)


def forkable(settings: ServiceSettings) -> bool:
    """Whether a process can be forked after the import of the engine: CPU engines with one thread, and gateways.

    CUDA does not survive a fork, and a library fixes its number of threads when it is loaded.
    """
    if isinstance(settings, WorkerSettings):
        plain = settings.ranks == settings.threads == 1
        return settings.engine == "vllm" and settings.accelerator == "cpu" and plain
    return isinstance(settings, GatewaySettings)


def child_environment(model: str, all_emulated: bool = False) -> dict[str, str]:
    """Our environment without POLYPHASE_…, since settings come from the cluster file alone.

    all_emulated: `model` serves as a tokenizer only, and the emulated model may have a longer context.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if os.path.isdir(model):
        env["HF_HUB_OFFLINE"] = "1"
    if all_emulated:
        env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return env
