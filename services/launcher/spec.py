"""What one host runs: its processes, their ports and health checks, and what is forked rather than started."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gateway.settings import GatewaySettings
from services.launcher.devices import Assignment
from services.launcher.ports import PortUse
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

OURS = "POLYPHASE_"  # begins the name of each of our variables
# What the fork server imports for each module that it forks, and the environment that it needs for that.
_PRELOAD = {
    "gateway": ("gateway.app", "shared.runtime.http"),
    "services.worker": ("services.worker.app", "services.worker.engines.vllm", "services.worker.kv.vllm.connector"),
}
_PRELOAD_ENV = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to keep running. `health_url` answers 200 once it is ready; empty: ready when it runs.

    One with a `module` may also be forked from a process that has imported the engine; see `fork_server`.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    health_url: str = ""
    ports: tuple[PortUse, ...] = ()
    module: str = ""
    settings: ServiceSettings | None = None  # what `env` says; None: not a service of ours
    start_s: float = 0.0  # the longest its start may take; 0: as long as any other process's
    may_be_late: bool = False  # the suite serves without it, should its start take longer than that


@dataclass(frozen=True, slots=True)
class Plan:
    """What one host runs, and where to find the rest."""

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
    gateway_urls: tuple[str, ...] = ()  # each process of the gateway alone; of one: `api_url`
    api_keys: bool = False  # whether the API wants a key
    devices: Assignment = field(
        default_factory=Assignment
    )  # of the instances that this host, and no other program, places

    @property
    def fork_env(self) -> dict[str, str] | None:
        """The fork server's environment; None when nothing is to be forked, or nothing can be.

        For the gateway alone it is worth it too: a lost one is back within two seconds, not after an import.
        """
        forked = [process for process in self.processes if process.module]
        if not forked or sys.platform != "linux":
            return None
        shared = {key: value for key, value in forked[0].env.items() if not key.startswith(OURS)}
        return {**shared, **_PRELOAD_ENV}

    @property
    def start_s(self) -> float:
        """The longest that an instance's start may take."""
        return max((each.start_s for each in self.processes if each.may_be_late), default=0.0)

    @property
    def preload(self) -> tuple[str, ...]:
        """What the fork server imports."""
        return tuple(dict.fromkeys(name for process in self.processes for name in _PRELOAD.get(process.module, ())))

    @property
    def port_uses(self) -> tuple[PortUse, ...]:
        """Every port that is listened on here."""
        return tuple(use for process in self.processes for use in process.ports)


def forkable(settings: ServiceSettings) -> bool:
    """Whether it imports the engine, and nothing of it but the engine's own CPU code at one thread, before a fork.

    CUDA cannot be used across a fork, and how many threads a library has is settled when it is loaded.
    """
    if isinstance(settings, WorkerSettings):
        plain = settings.ranks == settings.threads == 1
        return settings.engine == "vllm" and settings.accelerator == "cpu" and plain
    return isinstance(settings, GatewaySettings)


def child_environment(model: str, imitated: bool = False) -> dict[str, str]:
    """Ours without POLYPHASE_…: what is not in the cluster file does not count.

    imitated: `model` is only a tokenizer; a context beyond its positions is another model's, and nobody computes it.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if imitated:
        env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return env
