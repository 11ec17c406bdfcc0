"""The live half of `bench predictor --part worth`: emulated instances short of memory, and a predictor that is one of
the four arms.

It knows each answer because the first tokens of a prompt are its number, and says of it what its arm would. Clients
ask for MAX_TOKENS and get less: a stop token ends each answer where its length says.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from lab.bench.live_clusters import SERVICES
from lab.bench.predictor_worth_arms import NONE, Arms
from lab.bench.predictor_worth_sim import SLO, requests_of
from lab.bench.stream_client import StreamFailed, StreamResult, stream_completion
from lab.calibrate.target import Target
from services.worker.engines.emulated_scheduler import token_at
from shared.domain.job import LengthPrediction
from shared.errors import Busy
from shared.sim.workload import Lengths, Workload
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets

SHORTER, SLOWER = 5, 4.0  # lengths and speeds, so that two cores carry all tokens, and a run holds many answers
MAX_TOKENS = 512
LEAST_PROMPT = 8
_FIRST, _DIGIT = 300, 900  # of the tokens that number a prompt
_MIB = 1 << 20
# As slow as the instances.
LIVE_SLO = SLO.slower(SLOWER)
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? (\S+)$", re.MULTILINE)
CLUSTER: dict[str, Any] = {
    **SERVICES,
    "name": "bench predictor (emulated)",
    "max_model_len": 1024,
    "instance_defaults": {
        "engine": "emulated",
        "emulated_model": "Llama-3-8B",
        "emulated_slowdown": SLOWER,
        "emulated_link_gbps": 100.0,
        "accelerator": "A100-SXM-80",
        "chunk_size": 512,
        "max_seqs": 64,
    },
    "instances": [
        {"id": "prefill", "role": "prefill", "kv_cache_bytes": 4096 * _MIB},
        {"id": "decode", "count": 3, "role": "decode", "kv_cache_bytes": 224 * _MIB},
    ],
}


def cluster_into(folder: Path) -> Path:
    """The cluster file, to be started and to be simulated."""
    slo = {"default": LIVE_SLO.targets}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({**CLUSTER, "gateway": {"slo": slo}}))
    return file


def pointing_to(address: str) -> dict[str, str]:
    """What a gateway's environment has to say so that it asks there."""
    return {"POLYPHASE_GATEWAY_PREDICTORS": f'["{address}"]'}


def short_requests(count: int, seed: int, data: Path | None) -> Workload:
    """ShareGPT's lengths, a fifth of them."""
    whole = requests_of("sharegpt", count, seed, data)
    prompts = np.maximum(LEAST_PROMPT, whole.prompt_tokens // SHORTER)
    return Workload(whole.name, whole.arrival_s, prompts, np.maximum(1, whole.output_tokens // SHORTER))


class StandIn:
    """Says what the predictor of `arm` would; of the arm without one it has nothing to say."""

    def __init__(self, of_arm: Arms, output_tokens: Lengths, seed: int) -> None:
        self.arm = NONE
        self._of_arm = of_arm
        self._said = {arm: one.predict(output_tokens, seed) for arm, one in of_arm.items() if one is not None}

    def answer(self, prompt_token_ids: Sequence[int]) -> LengthPrediction:
        """Raises Busy, as a predictor that has no time does, where there is nothing to say."""
        predictor, number = self._of_arm[self.arm], number_of(prompt_token_ids)
        if predictor is None or not 0 <= number < len(self._said[self.arm]):
            raise Busy("no prediction")
        return predictor.as_prediction(int(self._said[self.arm][number]))

    @asynccontextmanager
    async def serving(self, address: str, curve: Curve | None = None) -> AsyncIterator[None]:
        """Answer gateways there that have these keys."""

        async def predict(request: PredictRequest, _: ServerCall) -> LengthPrediction:
            return self.answer(request.prompt_token_ids)

        sockets = Sockets(curve)
        try:
            async with RpcServer(sockets, address, {PREDICT: predict}):
                yield
        finally:
            sockets.close()


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt whose first tokens are its number."""
    rest = [_FIRST + (number * 31 + at * 7) % _DIGIT for at in range(tokens - 2)]
    return [_FIRST + number // _DIGIT, _FIRST + number % _DIGIT, *rest]


def number_of(prompt_token_ids: Sequence[int]) -> int:
    """Which request it is; -1 for a prompt without a number."""
    if len(prompt_token_ids) < LEAST_PROMPT:
        return -1
    high, low = (token - _FIRST for token in prompt_token_ids[:2])
    return high * _DIGIT + low if 0 <= low < _DIGIT and high >= 0 else -1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; None where it failed."""

    output_tokens: int
    seen: StreamResult | None

    @property
    def met(self) -> bool:
        """Whether it kept its targets."""
        seen, slo = self.seen, LIVE_SLO
        return (
            seen is not None
            and seen.ttft_s <= slo.ttft_s
            and seen.last_s - seen.ttft_s <= slo.tpot_s * (self.output_tokens - 1)
            and seen.gaps_met(slo.itl_s)
        )


async def send(target: Target, workload: Workload) -> list[Answer]:
    """All of them at their times."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(number: int) -> Answer:
        await asyncio.sleep(began + float(workload.arrival_s[number]) - loop.time())
        output = int(workload.output_tokens[number])
        body = _body(number, int(workload.prompt_tokens[number]), output)
        try:
            return Answer(output, await stream_completion(*target.api_address, body, target.api_key))
        except (StreamFailed, OSError):
            return Answer(output, None)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(workload))]
    return [task.result() for task in tasks]


def _body(number: int, prompt: int, output: int) -> dict[str, object]:
    """Its answer's last token occurs nowhere before it: no two positions of an answer so short have the same."""
    return {
        "model": "demo",
        "prompt": prompt_of(number, prompt),
        "max_tokens": MAX_TOKENS,
        "stop_token_ids": [token_at(prompt + output - 1)],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": secrets.token_hex(8),
    }


async def preemptions(target: Target) -> float:
    """So far, of all instances."""
    async with MonitorClient(target.monitor_url) as monitor:
        urls = [entry["info"]["http"] for entry in await monitor.instances()]
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        pages = [(await http.get(f"{url}/metrics")).text for url in urls]
    return sum(float(count) for page in pages for count in _PREEMPTIONS.findall(page))
