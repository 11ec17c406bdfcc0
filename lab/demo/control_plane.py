"""Promise 3, the control plane: serving goes on, or resumes within two seconds of a restart, and nothing hangs."""

import asyncio
import time
import uuid

from lab.demo.client import Answer, ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.errors import Unavailable

RESUME_S = 2.0
STREAM_TOKENS = 500
HANG_S = 30.0


async def check_control_plane(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of scheduler, monitor, predictor and planner, each under a stream and with new requests arriving."""
    section = Section("kill -9 of the scheduler, the monitor, the predictor and the planner")
    for process in suite.state.processes:
        if process.name.startswith(("scheduler", "monitor", "predictor", "planner")):
            await _lose(section, suite, api, prompts, process.name)
    await suite.wait_ready()
    return section


async def _lose(section: Section, suite: Suite, api: ApiClient, prompts: Prompts, process: str) -> None:
    begun = asyncio.Event()
    stream = asyncio.create_task(api.stream(_ask(prompts, STREAM_TOKENS), begun))
    await asyncio.wait_for(begun.wait(), HANG_S)
    pid = suite.kill(process)
    killed = time.monotonic()
    arriving = asyncio.create_task(_first_success(api, prompts))
    restart_s = await suite.restarted(process, pid)
    ready = killed + restart_s
    served, refused = await asyncio.wait_for(arriving, HANG_S)
    after_ready = served - ready
    answer = await asyncio.wait_for(stream, HANG_S)
    section.equal(f"{process}: the stream under way goes on", ("", STREAM_TOKENS), (answer.error, len(answer.tokens)))
    said = f"{max(0.0, after_ready):.2f} s after its restart, {refused} × 503 before"
    if not refused and after_ready <= 0:
        said = "without a refusal, while it was away"
    section.check(f"{process}: a new request is served", after_ready <= RESUME_S, "within 2 s of its restart", said)
    section.figures[f"restart_{process.replace('-', '_')}_s"] = restart_s
    section.figures[f"resume_after_{process.replace('-', '_')}_s"] = max(0.0, after_ready)


async def _first_success(api: ApiClient, prompts: Prompts) -> tuple[float, int]:
    """When a new request was first answered in full, and how many got a 503 before."""
    refused = 0
    while True:
        try:
            answer: Answer = await api.complete(_ask(prompts, 4))
        except Unavailable:
            refused += 1
            await asyncio.sleep(0.05)
            continue
        assert len(answer.tokens) == 4, answer
        return time.monotonic(), refused


def _ask(prompts: Prompts, tokens: int) -> Ask:
    name = f"demo-{uuid.uuid4().hex[:12]}"
    return Ask(prompts.of_length(64, seed=int(name[-6:], 16)), tokens, name, name)
