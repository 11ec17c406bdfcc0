"""A suite of real engines on this machine's cores, each held to a share of one: unlike instances without a GPU."""

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

from benchmarks.experiment import WHO, Found, Session, measured
from benchmarks.suite import BARE, DEMO_MODEL
from services.launcher.suite import Suite
from shared.domain.instance import InstanceInfo
from shared.errors import InvalidRequest, Unavailable
from tools.calibrate.target import Target, Traffic

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


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


def make_llama(folder: Path, shape: LlamaShape, tokenizer_of: Path, seed: int = 0) -> Path:
    """Write the model into `folder`, with the tokenizer of the model in `tokenizer_of`. Weights are float16.

    Raises InvalidRequest when there is no tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if not (tokenizer_of / name).is_file():
            raise InvalidRequest(f"{tokenizer_of / name} is missing: the random model takes its tokenizer from there")
        shutil.copy(tokenizer_of / name, folder / name)
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
    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(size, np.float16)
        if len(size) == 1
        else (rng.standard_normal(size, np.float32) * 0.02).astype(np.float16)
        for name, size in _sizes(shape).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _sizes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
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
    return sizes | {"model.norm.weight": (hidden,)}


CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a step is slowed down evenly and not now and then
LEAST_US = 1_000  # the kernel takes no less
REMOVE_S = 5.0
_NAME = re.compile(r"polyphase-(\d+)-(\d+)-[\w.-]+")


@dataclass(frozen=True, slots=True)
class Throttled:
    """What a group has met so far: periods in which it ran, those in which it used its quota up, seconds lost so."""

    periods: int
    throttled: int
    lost_s: float

    def since(self, before: "Throttled") -> "Throttled":
        return Throttled(self.periods - before.periods, self.throttled - before.throttled, self.lost_s - before.lost_s)

    @property
    def share(self) -> float:
        """Of the periods, those in which the quota was used up: 1 when computing is all there is."""
        return self.throttled / self.periods if self.periods else 0.0


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """A cgroup with a quota, at first of `cores`."""

    path: Path
    cores: float
    unified: bool  # v2

    def add(self, pid: int) -> None:
        """Hold a process, its threads and its children to the quota. Raises Unavailable."""
        try:
            root = psutil.Process(pid)
            pids = [pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise Unavailable(f"{self.path.name}: there is no process {pid}") from error
        for one in pids:
            _write(self.path / "cgroup.procs", str(one))

    def limit(self, cores: float) -> None:
        """Another quota from now on. Raises Unavailable, and InvalidRequest for one that is too small."""
        _limit(self.path, self.unified, cores)

    def pids(self) -> tuple[int, ...]:
        return tuple(map(int, (self.path / "cgroup.procs").read_text().split()))

    def throttled(self) -> Throttled:
        rows = (line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        counters = {row[0]: int(row[1]) for row in rows if len(row) == 2}
        lost_s = counters.get("throttled_usec", 0) / 1e6 if self.unified else counters.get("throttled_time", 0) / 1e9
        return Throttled(counters.get("nr_periods", 0), counters.get("nr_throttled", 0), lost_s)


@contextmanager
def cpu_quota(name: str, cores: float, cgroups: Path = CGROUPS) -> Iterator[CpuGroup]:
    """A group that may use so many cores, for the block's length; before others where cores are short.

    Groups that a killed process has left are removed first. Raises Unavailable, which says what is missing, where this
    machine does not allow it, and InvalidRequest for a quota that is too small.
    """
    _check(name, cores)
    parent, unified = _parent(cgroups)
    _remove_leftovers(parent)
    started = round(psutil.Process().create_time() * 100)
    path = parent / f"polyphase-{getpid()}-{started}-{name}"
    _make(path)
    try:
        _limit(path, unified, cores)
        if unified:
            _write(path / "cpu.weight", "10000")  # the greatest there is
        else:
            _write(path / "cpu.shares", "262144")  # the greatest there is
        yield CpuGroup(path, cores, unified)
    finally:
        _remove(path)


def _check(name: str, cores: float) -> None:
    if cores * PERIOD_US < LEAST_US:
        raise InvalidRequest(f"{name}: a quota of {cores:g} cores is less than {LEAST_US / PERIOD_US:g}")


def _limit(path: Path, unified: bool, cores: float) -> None:
    _check(path.name, cores)
    quota_us = round(cores * PERIOD_US)
    if unified:
        _write(path / "cpu.max", f"{quota_us} {PERIOD_US}")
    else:
        _write(path / "cpu.cfs_period_us", str(PERIOD_US))
        _write(path / "cpu.cfs_quota_us", str(quota_us))


def _parent(cgroups: Path) -> tuple[Path, bool]:
    """The cgroup below which new groups are made, and whether it is v2."""
    for name in ("cpu", "cpu,cpuacct"):
        if (cgroups / name / "cgroup.procs").exists():
            return cgroups / name, False
    known = cgroups / "cgroup.controllers"
    if not known.exists():
        raise Unavailable(f"CPU quotas: no cgroup is mounted at {cgroups}, neither v1 with `cpu` nor v2")
    if "cpu" not in known.read_text().split():
        raise Unavailable(f"CPU quotas: {known} does not name the controller `cpu`")
    control = cgroups / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        _write(control, "+cpu")
    return cgroups, True


def _make(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise _refusal(path.parent, error) from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _refusal(file, error) from error


def _refusal(where: Path, error: OSError) -> Unavailable:
    who = "" if geteuid() == 0 else "; this needs root"
    return Unavailable(f"CPU quotas: {where} cannot be changed ({error.strerror}){who}")


def _remove_leftovers(parent: Path) -> None:
    for path in parent.glob("polyphase-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and not _alive(int(found[1]), int(found[2])):
            _remove(path)


def _alive(pid: int, started: int) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() * 100 - started) <= 2
    except psutil.NoSuchProcess:
        return False


def _remove(path: Path) -> None:
    """Let its processes go on without a quota, and remove it; a process that is ending keeps it a moment longer."""
    give_up = time.monotonic() + REMOVE_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split() if (path / "cgroup.procs").exists() else ():
            with suppress(OSError):  # it has ended
                (path.parent / "cgroup.procs").write_text(pid)
        try:
            rmdir(path)
        except OSError as error:
            if time.monotonic() > give_up:
                raise Unavailable(f"CPU quotas: {path} cannot be removed ({error.strerror})") from error
            time.sleep(0.02)


FLIP_S = 60.0  # a drain may take so long


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
        found = await self.suite.instances()
        return [msgspec.convert(entry["info"], InstanceInfo) for entry in found.values()]

    async def flip(self, *names: str) -> None:
        """Change the roles of these instances. Raises the monitor's errors."""
        async with self.suite.monitor() as monitor:
            for name in names:
                await monitor.flip(name, drain_timeout_s=FLIP_S, force=True, who=WHO)

    def check(self) -> None:
        """Raises Unavailable when an instance was started again meanwhile, and so without its quota."""
        for name, pid in self.pids.items():
            if self.suite.state.pid(name) != pid:
                raise Unavailable(f"the instance {name} was started again, without its quota: nothing to compare")


Kind = TypeVar("Kind", bound=QuotaSuite)


async def measured_under_quotas(
    kind: type[Kind],
    shape: LlamaShape,
    cores: Mapping[str, float],
    cluster_of: Callable[[Path], dict[str, Any]],
    work: Callable[[Kind], Coroutine[Any, Any, Found]],
    seed: int,
) -> Found:
    """The result of `work` on a suite of real engines of a random Llama, each held to its share of the cores.

    cluster_of: makes the cluster file of the model's folder. Raises Unavailable where this machine allows no quotas.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cpu_quota(name, share)) for name, share in cores.items()}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyphase-engines-")))
        model = make_llama(folder / "model", shape, DEMO_MODEL)

        async def held(session: Session) -> Found:
            pids = {name: session.suite.state.pid(name) for name in groups}
            for name, pid in pids.items():
                groups[name].add(pid)
            return await work(kind(session, groups, pids))

        return await measured(cluster_of(model), held, seed=seed)


def cluster_file(
    name: str, model: Path, instances: Sequence[Mapping[str, str]], max_model_len: int, **defaults: int
) -> dict[str, Any]:
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
