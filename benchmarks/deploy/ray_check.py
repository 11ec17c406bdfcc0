"""`make ray-check`: a suite on Ray nodes of this machine. An instance and a node are lost, and two nodes join."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.demo.checked_suite import CheckedSuite, asks_for
from benchmarks.demo.report import Check, Report, Section
from benchmarks.suite import BARE, CPU_ENGINE, SPLIT, on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.on_ray import stay_local
from services.launcher.suite import until
from services.launcher.supervisor import State, Status
from services.launcher.up import running_suite
from tools.client import ApiClient, Prompts

if TYPE_CHECKING:
    from services.launcher.on_ray.suite import RayInstances

stay_local()
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.cluster_utils import Cluster as RayCluster  # noqa: E402

# Three nodes have room for one instance each: the third decode instance waits for a node.
CLUSTER: dict[str, Any] = {
    **BARE,
    "name": "on Ray",
    "gateway": {"dtype": "float32"},
    "policies": SPLIT,
    "instance_defaults": CPU_ENGINE,
    "instances": [
        {"id": "prefill-0", "role": "prefill", "resources": {"A100": 1}},
        {"id": "decode", "count": 3, "role": "decode", "resources": {"A10": 1}},
    ],
}
BACK_S = 240.0  # at most, on a busy machine
LONG_TOKENS, LOST_AFTER = 300, 30
STREAMS = 6
_NODE: dict[str, object] = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20, "num_cpus": 4}


class RayNodes:
    """A head without room for instances, and nodes with the accelerators that they claim to have, on the loopback."""

    def __init__(self) -> None:
        head = {**_NODE, "num_cpus": 0, "include_dashboard": False}
        self.cluster = RayCluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, object] = {}

    def add(self, **resources: float) -> None:
        node = self.cluster.add_node(resources=resources, **_NODE)
        self._nodes[node.node_id] = node

    def lose(self, node_id: str) -> None:
        self.cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()


@dataclass(frozen=True, slots=True)
class RaySuite(CheckedSuite):
    nodes: RayNodes

    @property
    def _on_ray(self) -> "RayInstances":
        assert self.running.remote is not None
        return self.running.remote

    def statuses(self) -> dict[str, Status]:
        return {status.name: status for status in self._on_ray.statuses}

    def waiting(self) -> list[str]:
        return [status.name for status in self.statuses().values() if status.state is State.WAITING]

    def node_of(self, name: str) -> str:
        """The Ray node that an instance is on."""
        return self._on_ray.node_of(name)

    async def until_ready(self, *names: str) -> float:
        """Wait until the monitor reports them as ready; returns the seconds that it took."""
        began = time.monotonic()
        await self.suite.wait_ready(names, BACK_S)
        return time.monotonic() - began


async def starts(checked: RaySuite, section: Section) -> None:
    section.figures["up_s"] = checked.running.took_s
    where = checked.statuses()
    ready = [name for name, status in where.items() if status.state is State.READY]
    notes = [where[name].note for name in checked.waiting()]
    section.lines += [f"{name}: {status.state.value} {status.note}" for name, status in where.items()]
    section.equal("instances ready", 3, len(ready))
    section.equal("instances that wait for a node", 1, len(notes))
    section.check("it says for what", all("A10" in note for note in notes), "A10", notes)
    section.equal("nodes in use", 3, len(set(map(checked.node_of, ready))))


async def answers(checked: RaySuite, section: Section) -> None:
    """A chat, and a prompt that one node computes and another decodes."""
    reply = await checked.api.chat("Hello!", max_tokens=16)
    section.check("a chat", bool(reply["choices"][0]["message"]["content"]), "an answer", reply["choices"][0])
    wanted = asks_for([checked.prompts.of_length(200, seed=5)], 24)
    answer = await checked.api.complete(wanted[0])
    (record,) = await checked.records(wanted)
    section.equal("tokens", 24, len(answer.tokens))
    section.check("its KV went from one node to the other", record.pulled, "pulled", record.outcomes)


async def an_instance_dies(checked: RaySuite, section: Section) -> None:
    """Ray restarts the instance, and its streams go on elsewhere."""

    def kill(victim: str) -> None:
        os.killpg(checked.statuses()[victim].pid, signal.SIGKILL)

    victim = await checked.lose_in_stream(section, kill, STREAMS, LONG_TOKENS, LOST_AFTER)
    began = time.monotonic()
    await until(lambda: checked.statuses()[victim].restarts > 0, BACK_S, f"{victim} to be started again")
    await checked.until_ready(victim)
    section.figures["instance_back_s"] = time.monotonic() - began
    section.check("Ray started it again", True, "again", checked.statuses()[victim].restarts)


async def a_node_dies(checked: RaySuite, section: Section) -> None:
    """All processes of a node are killed; its instance waits for another node."""
    victim = await checked.lose_in_stream(
        section, lambda name: checked.nodes.lose(checked.node_of(name)), STREAMS, LONG_TOKENS, LOST_AFTER
    )
    await until(lambda: victim in checked.waiting(), BACK_S, f"{victim} to wait for a node")
    section.check("its instance waits for another node", True, "waiting", checked.statuses()[victim].note)


async def nodes_join(checked: RaySuite, section: Section) -> None:
    """Instances that wait for a node start on the new ones, and get work."""
    waiting = checked.waiting()
    (ask,) = asks_for([checked.prompts.of_length(100, seed=61)], LONG_TOKENS)
    stream = asyncio.create_task(checked.api.stream(ask))
    for _ in waiting:
        checked.nodes.add(A10=1)
    section.figures["join_s"] = await checked.until_ready(*waiting)
    section.equal("stream meanwhile ended well", "", (await stream).error)
    wanted = asks_for(checked.prompts.various(24, 60, 120, seed=71), 24)
    found = await asyncio.gather(*map(checked.api.complete, wanted))
    section.equal("answers", len(wanted), sum(len(answer.tokens) == 24 for answer in found))
    used = {record.row.decode_instance for record in await checked.records(wanted)}
    section.check("those that joined get work", set(waiting) <= used, waiting, sorted(used))


CHECKS: dict[str, Check[RaySuite]] = {
    "The suite starts on three nodes": starts,
    "It answers": answers,
    "kill -9 of a decode instance in the middle of a stream": an_instance_dies,
    "A node is lost in the middle of streams": a_node_dies,
    "Two nodes join while it serves": nodes_join,
}


@asynccontextmanager
async def place_on_ray(console: Console, cluster: Mapping[str, Any] = CLUSTER) -> AsyncIterator[RaySuite]:
    with ray_nodes() as nodes, tempfile.TemporaryDirectory(prefix="polyphase-ray-") as folder:
        for accelerator in ("A100", "A10", "A10"):
            nodes.add(**{accelerator: 1})
        wanted, address = on_free_ports(Cluster.model_validate(cluster)), str(nodes.cluster.address)
        async with (
            running_suite(wanted, Path(folder), console, ray=address) as running,
            ApiClient(running.plan.api_url, running.plan.model) as api,
        ):
            yield RaySuite(running, api, await Prompts.of(api), nodes)


async def check(report: Report) -> None:
    async with place_on_ray(report.console) as checked:
        await checked.running.supervisor.during(report.run(CHECKS, checked, stop=True))
        ended = time.monotonic()
    report.figures["down_s"] = time.monotonic() - ended
    report.summarise()


def main() -> None:
    report = Report(Console())
    asyncio.run(check(report))
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
