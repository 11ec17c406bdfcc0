"""Suites of real engines on this machine's cores: a small random model, and CPU quotas that make engines unlike."""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from os import geteuid, getpid, rmdir
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.experiment import WHO, Session, measured
from benchmarks.suite import BARE, DEMO_MODEL
from services.launcher.suite import Suite
from shared.domain.instance import InstanceInfo
from shared.errors import InvalidRequest, Unavailable
from tools.calibrate.target import Target, Traffic

# The model.


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes, by the names of a config.json; embeddings are tied."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Of float32."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim * 4


def make_llama(folder: Path, shape: LlamaShape) -> Path:
    """Write a model with random float16 weights and the demo model's tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **asdict(shape),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for number in range(shape.num_hidden_layers):
        sizes |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    sizes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(0)
    weights = {
        name: (np.ones(size) if len(size) == 1 else rng.standard_normal(size, np.float32) * 0.02).astype(np.float16)
        for name, size in sizes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# CPU quotas.

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a quota slows a step down evenly
MIN_QUOTA_US = 1_000  # the kernel refuses less
REMOVE_S = 5.0
_NAME = re.compile(r"polyphase-(\d+)-(\d+)-[\w.-]+")


@dataclass(frozen=True, slots=True)
class Throttled:
    """Counters of a group: periods in which it ran, periods in which it used its quota up, and seconds lost so."""

    periods: int
    throttled: int
    lost_s: float

    def since(self, before: "Throttled") -> "Throttled":
        return Throttled(self.periods - before.periods, self.throttled - before.throttled, self.lost_s - before.lost_s)

    @property
    def share(self) -> float:
        """The share of periods in which the quota was used up."""
        return self.throttled / self.periods if self.periods else 0.0


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """A cgroup with a CPU quota."""

    path: Path
    unified: bool  # cgroup v2

    def add(self, pid: int) -> None:
        """Hold a process, its threads and its children to the quota. Raises Unavailable."""
        try:
            root = psutil.Process(pid)
            pids = [pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise Unavailable(f"{self.path.name}: there is no process {pid}") from error
        for each in pids:
            _write(self.path / "cgroup.procs", str(each))

    def limit(self, cores: float) -> None:
        """Set the quota. Raises Unavailable, and InvalidRequest for one that is too small."""
        _check(self.path.name, cores)
        quota_us = round(cores * PERIOD_US)
        if self.unified:
            _write(self.path / "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            _write(self.path / "cpu.cfs_period_us", str(PERIOD_US))
            _write(self.path / "cpu.cfs_quota_us", str(quota_us))

    def throttled(self) -> Throttled:
        rows = (line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        counters = {row[0]: int(row[1]) for row in rows if len(row) == 2}
        lost_s = counters.get("throttled_usec", 0) / 1e6 if self.unified else counters.get("throttled_time", 0) / 1e9
        return Throttled(counters.get("nr_periods", 0), counters.get("nr_throttled", 0), lost_s)


@contextmanager
def cpu_quota(name: str, cores: float, cgroups: Path = CGROUPS) -> Iterator[CpuGroup]:
    """A group that may use so many cores, with the highest priority where cores are short.

    Groups of processes that have ended are removed first. Raises Unavailable, which says what is missing, where this
    machine does not allow quotas, and InvalidRequest for a quota that is too small.
    """
    _check(name, cores)
    parent, unified = _parent(cgroups)
    for path in parent.glob("polyphase-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and not _alive(int(found[1]), int(found[2])):
            _remove(path)
    started = round(psutil.Process().create_time() * 100)
    group = CpuGroup(parent / f"polyphase-{getpid()}-{started}-{name}", unified)
    try:
        group.path.mkdir()
    except OSError as error:
        raise _refusal(parent, error) from error
    try:
        group.limit(cores)
        _write(*((group.path / "cpu.weight", "10000") if unified else (group.path / "cpu.shares", "262144")))
        yield group
    finally:
        _remove(group.path)


def _check(name: str, cores: float) -> None:
    if cores * PERIOD_US < MIN_QUOTA_US:
        raise InvalidRequest(f"{name}: a quota of {cores:g} cores is less than {MIN_QUOTA_US / PERIOD_US:g}")


def _parent(cgroups: Path) -> tuple[Path, bool]:
    """The cgroup below which new groups are made, and whether it is v2."""
    for name in ("cpu", "cpu,cpuacct"):
        if (cgroups / name / "cgroup.procs").exists():
            return cgroups / name, False
    known, enabled = cgroups / "cgroup.controllers", cgroups / "cgroup.subtree_control"
    if not known.exists():
        raise Unavailable(f"CPU quotas: no cgroup is mounted at {cgroups}, neither v1 with `cpu` nor v2")
    if "cpu" not in known.read_text().split():
        raise Unavailable(f"CPU quotas: {known} does not name the controller `cpu`")
    if "cpu" not in enabled.read_text().split():
        _write(enabled, "+cpu")
    return cgroups, True


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _refusal(file, error) from error


def _refusal(where: Path, error: OSError) -> Unavailable:
    root = "" if geteuid() == 0 else "; this needs root"
    return Unavailable(f"CPU quotas: {where} cannot be changed ({error.strerror}){root}")


def _alive(pid: int, started: int) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() * 100 - started) <= 2
    except psutil.NoSuchProcess:
        return False


def _remove(path: Path) -> None:
    """Move the group's processes out of it, and remove it; a process that is ending keeps it a moment longer."""
    deadline = time.monotonic() + REMOVE_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split() if (path / "cgroup.procs").exists() else ():
            with suppress(OSError):  # it has ended
                (path.parent / "cgroup.procs").write_text(pid)
        try:
            rmdir(path)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"CPU quotas: {path} cannot be removed ({error.strerror})") from error
            time.sleep(0.02)


# Suites.

DRAIN_TIMEOUT_S = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class QuotaSuite:
    """A running suite with a client; groups and process ids by instance."""

    session: Session
    groups: Mapping[str, CpuGroup]
    pids: Mapping[str, int]

    @property
    def suite(self) -> Suite:
        return self.session.suite

    @property
    def target(self) -> Target:
        return self.session.target

    @property
    def traffic(self) -> Traffic:
        return self.session.traffic

    async def instances(self) -> list[InstanceInfo]:
        """As the monitor knows them, with the rates that they have learned."""
        entries = await self.suite.instances()
        return [msgspec.convert(entry.info, InstanceInfo) for entry in entries.values()]

    async def flip(self, *names: str) -> None:
        """Change the roles of these instances. Raises the monitor's errors."""
        async with self.suite.monitor() as monitor:
            for name in names:
                await monitor.flip(name, drain_timeout_s=DRAIN_TIMEOUT_S, force=True, who=WHO)

    def check(self) -> None:
        """Raises Unavailable when an instance was restarted, and so without its quota."""
        for name, pid in self.pids.items():
            if self.suite.state.pid(name) != pid:
                raise Unavailable(f"the instance {name} was restarted without its quota: nothing can be compared")


AnySuite = TypeVar("AnySuite", bound=QuotaSuite)


async def measured_under_quotas(
    kind: type[AnySuite],
    shape: LlamaShape,
    cores: Mapping[str, float],
    cluster_of: Callable[[Path], dict[str, object]],
    work: Callable[[AnySuite], Coroutine[Any, Any, Result]],
    seed: int,
) -> Result:
    """The result of `work` on a suite of real engines of a random Llama, each held to its share of the cores.

    cluster_of: makes the cluster file of the model's folder. Raises Unavailable where this machine allows no quotas.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cpu_quota(name, share)) for name, share in cores.items()}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyphase-engines-")))
        model = make_llama(folder / "model", shape)

        async def limited(session: Session) -> Result:
            pids = {name: session.suite.state.pid(name) for name in groups}
            for name, pid in pids.items():
                groups[name].add(pid)
            return await work(kind(session, groups, pids))

        return await measured(cluster_of(model), limited, seed=seed)


def cluster_file(
    name: str, model: Path, instances: Sequence[Mapping[str, str]], max_model_len: int, **defaults: int
) -> dict[str, object]:
    """A cluster file of vLLM instances on one thread each. defaults: more of `instance_defaults`."""
    return {
        **BARE,
        "name": f"bench {name}",
        "model": str(model),
        "served_model_name": name,
        "max_model_len": max_model_len,
        "gateway": {"dtype": "float32", "max_queued_jobs": 4096, "job_timeout_s": 900.0},
        "instance_defaults": {"engine": "vllm", "accelerator": "cpu", "dtype": "float32", "threads": 1, **defaults},
        "instances": list(instances),
    }
