"""`make ray-check`: a suite on Ray nodes of this machine. An instance and a node are lost, and two nodes join."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo import jobs
from benchmarks.demo.answers import asks, reference, same_tokens
from benchmarks.demo.client import ApiClient, Prompts
from benchmarks.demo.report import Section, show_section, show_summary
from benchmarks.deploy.ray_nodes import RayNodes, ray_nodes
from benchmarks.suite import on_free_ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.suite import until
from services.launcher.supervisor import State, Status
from services.launcher.up import RunningSuite, running_suite

FILE = Path(__file__).with_name("on_ray.yaml")
BACK_S = 90.0
LONG_TOKENS, LOST_AFTER = 300, 30
STREAMS = 6


@dataclass(frozen=True, slots=True)
class Place:
    """The suite, a client of it, and its Ray nodes."""

    nodes: RayNodes
    running: RunningSuite
    api: ApiClient
    prompts: Prompts

    def status(self, name: str) -> Status:
        return next(each for each in self.running.remote.statuses if each.name == name)

    def node_of(self, name: str) -> str:
        """The Ray node that an instance is on."""
        return self.running.remote.node_of(name)

    async def until_ready(self, *names: str) -> float:
        """Wait until the monitor reports them as ready; returns the seconds that it took."""
        began = time.monotonic()
        await self.running.suite.wait_ready(names, BACK_S)
        return time.monotonic() - began


Step = Callable[[Place], Coroutine[Any, Any, Section]]


async def starts(place: Place) -> Section:
    section = Section("The suite starts on three nodes")
    section.figures["up_s"] = place.running.took_s
    where = {status.name: status for status in place.running.remote.statuses}
    waiting = [status for status in where.values() if status.state is State.WAITING]
    section.lines += [f"{name}: {status.state.value} {status.note}" for name, status in where.items()]
    section.equal("instances ready", 3, sum(status.state is State.READY for status in where.values()))
    section.equal("instances that wait for a node", 1, len(waiting))
    section.check("it says for what", all("A10" in status.note for status in waiting), "A10", [s.note for s in waiting])
    nodes = {place.node_of(name) for name, status in where.items() if status.state is State.READY}
    section.equal("nodes in use", 3, len(nodes))
    return section


async def answers(place: Place) -> Section:
    """A chat, and a prompt that one node computes and another decodes."""
    section = Section("It answers")
    said = await place.api.chat("Hello!", max_tokens=16)
    section.check("a chat", bool(said["choices"][0]["message"]["content"]), "an answer", said["choices"][0])
    wanted = asks([place.prompts.of_length(200, seed=5)], 24)
    answer = await place.api.complete(wanted[0])
    (record,) = await jobs.records(place.running.suite, [wanted[0].request_id])
    section.equal("tokens", 24, len(answer.tokens))
    section.check("its KV went from one node to the other", record.pulled, "pulled", record.outcomes)
    return section


async def an_instance_dies(place: Place) -> Section:
    """Ray restarts the instance, and its streams go on elsewhere."""
    section = Section("kill -9 of a decode instance in the middle of a stream")

    def kill(victim: str) -> None:
        os.killpg(place.status(victim).pid, signal.SIGKILL)

    victim = await _lose_during(place, section, kill)
    section.figures["instance_back_s"] = await _back(place, victim)
    section.check("Ray started it again", place.status(victim).restarts > 0, "again", place.status(victim).restarts)
    return section


async def a_node_dies(place: Place) -> Section:
    """All processes of a node are killed; its instance waits for another node."""
    section = Section("A node is lost in the middle of streams")
    victim = await _lose_during(place, section, lambda name: place.nodes.lose(place.node_of(name)))

    def waits() -> bool:
        return place.status(victim).state is State.WAITING

    await until(waits, BACK_S, f"{victim} to wait for a node")
    section.lines.append(f"{victim}: {place.status(victim).state.value} {place.status(victim).note}")
    section.check("its instance waits for another node", waits(), "waiting", place.status(victim).state)
    return section


async def nodes_join(place: Place) -> Section:
    """Instances that wait for a node start on the new ones, and get work."""
    section = Section("Two nodes join while it serves")
    waiting = [s.name for s in place.running.remote.statuses if s.state is State.WAITING]
    (ask,) = asks([place.prompts.of_length(100, seed=61)], LONG_TOKENS)
    stream = asyncio.create_task(place.api.stream(ask))
    for _ in waiting:
        place.nodes.add(A10=1)
    section.figures["join_s"] = await place.until_ready(*waiting)
    section.equal("stream meanwhile ended well", "", (await stream).error)
    wanted = asks(place.prompts.various(24, 60, 120, seed=71), 24)
    found = await asyncio.gather(*(place.api.complete(ask) for ask in wanted))
    section.equal("answers", len(wanted), sum(len(answer.tokens) == 24 for answer in found))
    used = {r.row["decode_instance"] for r in await jobs.records(place.running.suite, [a.request_id for a in wanted])}
    section.check("those that joined get work", set(waiting) <= used, waiting, sorted(used))
    return section


STEPS: tuple[Step, ...] = (starts, answers, an_instance_dies, a_node_dies, nodes_join)


async def check(console: Console, sections: list[Section], figures: dict[str, float]) -> None:
    async with standing(console, figures) as place:
        for number, step in enumerate(STEPS, 1):
            began = time.monotonic()
            section = await place.running.supervisor.during(step(place))
            section.took_s = time.monotonic() - began
            sections.append(section)
            figures.update(section.figures)
            show_section(console, number, section)
        began = time.monotonic()
    figures["down_s"] = time.monotonic() - began


@asynccontextmanager
async def standing(console: Console, figures: dict[str, float], cluster: Cluster | None = None) -> AsyncIterator[Place]:
    """The suite on three nodes: of `cluster`, or of the file beside this module."""
    began = time.monotonic()
    with ray_nodes() as nodes, tempfile.TemporaryDirectory(prefix="polyphase-ray-") as folder:
        nodes.add(A100=1)
        nodes.add(A10=1)
        nodes.add(A10=1)
        figures["ray_start_s"] = time.monotonic() - began
        wanted = on_free_ports(cluster or load_cluster(FILE))
        async with (
            running_suite(wanted, Path(folder), console, ray=nodes.address) as running,
            ApiClient(running.plan.api_url, running.plan.model) as api,
        ):
            yield Place(nodes, running, api, await Prompts.of(api))


async def _lose_during(place: Place, section: Section, lose: Callable[[str], None]) -> str:
    """Lose the decode instance of one of several streams; returns its name. Each token must come once."""
    prompts = place.prompts.various(STREAMS, 60, 160, seed=41)
    plain = await reference(place.running.suite, place.api, prompts, LONG_TOKENS)
    wanted = asks(prompts, LONG_TOKENS)
    others = [asyncio.create_task(place.api.stream(ask)) for ask in wanted[1:]]
    stream = await place.api.begin(wanted[0], LOST_AFTER)
    lost = str((await jobs.find_row(place.running.suite, wanted[0].request_id))["decode_instance"])
    await asyncio.to_thread(lose, lost)
    found = await asyncio.gather(stream, *others)
    section.equal("streams that ended well", STREAMS, sum(not answer.error for answer in found))
    section.equal("token for token as undisturbed", STREAMS, same_tokens(plain, found))
    records = await jobs.records(place.running.suite, [ask.request_id for ask in wanted])
    section.check("some went on elsewhere", any(r.attempts > 1 for r in records), "some", [r.attempts for r in records])
    return lost


async def _back(place: Place, name: str) -> float:
    began = time.monotonic()
    await until(lambda: place.status(name).restarts > 0, BACK_S, f"{name} to be started again")
    await place.until_ready(name)
    return time.monotonic() - began


def main() -> None:
    """Exit code 0: everything held."""
    console = Console()
    sections: list[Section] = []
    figures: dict[str, float] = {}
    began = time.monotonic()
    asyncio.run(check(console, sections, figures))
    figures["total_s"] = time.monotonic() - began
    show_summary(console, sections, figures)
    sys.exit(0 if all(section.ok for section in sections) else 1)


if __name__ == "__main__":
    main()
