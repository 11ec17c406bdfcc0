"""A real Prometheus scrapes a small emulated suite by our discovery: figures add up, and every query answers."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml
from rich.console import Console

from benchmarks.suite import address_of, on_free_ports
from services.launcher.cluster_file import load_cluster
from services.launcher.suite import until
from services.launcher.up import RunningSuite, running_suite
from tests.deploy.observability import Prometheus, need, panel_queries, prometheus, rules
from tests.deploy.test_observability import samples
from tests.deploy.vllm_queries import vllm_queries
from tests.patient_clusters import patient
from tests.services.expositions import expositions
from tests.services.test_metric_owners import complaints
from tools.client import COMPLETIONS, ApiClient, Ask, Ending, Request, completion_body, send

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
MODEL = "m"
WINDOW = "2m"
# Series without samples: no request is refused or delayed, the predictor has no classifier, the planner no proposal.
SILENT = {
    "polyphase_refused_total",
    "polyphase_delayed_total",
    "polyphase_gateway_delayed_jobs",
    "polyphase_predictor_fallbacks_total",
    "polyphase_plan_proposals_total",
    "polyphase_store_dropped_total",
    'outcome="recomputed"',
}


@dataclass
class Sent:
    """What the load generator has sent and got."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    slos: Counter[str] = field(default_factory=Counter)  # classes of what was completed
    prompt_tokens: int = 0
    generated_tokens: int = 0
    transfers: int = 0

    @property
    def jobs(self) -> int:
        return self.outcomes.total()


@dataclass
class Scene:
    """A suite after its load, and the Prometheus that saw all of it."""

    running: RunningSuite
    prometheus: Prometheus
    sent: Sent


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    need("prometheus")
    folder = tmp_path_factory.mktemp("suite")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(patient(content())))
    cluster = on_free_ports(load_cluster(folder / "cluster.yaml"))
    async with (
        running_suite(cluster, folder / "data", Console(stderr=True)) as running,
        prometheus(folder, running.plan.monitor_url) as prom,
    ):
        processes = len(running.plan.processes)
        await until(lambda: _answering(prom, processes), 120, "every process to be scraped")
        sent = await load(running.plan.gateway_urls)
        await flip(running)
        await until(lambda: _seen(prom, sent), 120, "all jobs to be scraped")
        done_s = time.time()
        await until(lambda: _scraped(prom, done_s), 60, "everything to be scraped once more")
        yield Scene(running, prom, sent)


def content() -> dict[str, Any]:
    instance = {
        "engine": "emulated",
        "accelerator": "A100-SXM-80",
        "kv_cache_bytes": 1 << 30,
        "emulated_step_s": 0.004,
        "emulated_prefill_s_per_token": 0.002,  # a long prompt takes longer than the text of /metrics is kept
        "emulated_link_gbps": 25,
    }
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    return {
        "name": "test",
        "model": "models/demo",
        "served_model_name": MODEL,
        "gateway": {
            "processes": 2,
            "slo": {"default": {"ttft_s": 60, "tpot_s": 60}, "strict": {"ttft_s": 1e-6, "tpot_s": 60}},
        },
        "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
        "dashboard": {"enabled": False},
        "instances": [{"id": name, "role": role, **instance} for name, role in roles.items()],
    }


async def load(urls: tuple[str, ...]) -> Sent:
    """Streams and whole answers to each gateway, some of one token; a client that leaves, and a bad request."""
    sent = Sent()
    await asyncio.gather(*(complete(urls[number % 2], sent, number) for number in range(40)))
    for number, url in enumerate(urls):
        async with ApiClient(url, MODEL) as api:
            await leave(api, url, sent, token=300 + number)
            answer = await api.post(COMPLETIONS, json={"model": MODEL, "prompt": [1] * 9000})
        assert answer.status_code == 400
        sent.statuses["4xx"] += 1
    return sent


async def complete(url: str, sent: Sent, number: int) -> None:
    length, most, answers = 50 + 7 * number, 1 + number % 9, 1 + (number % 5 == 0)
    stream: dict[str, Any] = {"stream_options": {"include_usage": True}} if number % 2 == 0 else {"stream": False}
    prompt = [300 + (number * 31 + at) % 400 for at in range(length)]
    slo = "strict" if number % 4 == 1 else "default"
    body = completion_body(prompt, most, MODEL, n=answers, temperature=1, **stream)  # n = 2 needs sampling
    answer = await send(address_of(url), Request(COMPLETIONS, body, slo))
    assert answer.ending is Ending.DONE, answer
    assert (answer.usage["prompt_tokens"], answer.completion_tokens) == (length, most * answers)
    sent.statuses["2xx"] += 1
    sent.outcomes["length"] += answers
    sent.slos[slo] += answers
    sent.prompt_tokens += length * answers  # each answer is a job with the whole prompt, as with vLLM
    sent.generated_tokens += most * answers
    sent.transfers += answers if most > 1 else 0


async def leave(api: ApiClient, url: str, sent: Sent, token: int) -> None:
    """A client that leaves while its prompt is computed: of its request only the cancellation counts."""

    async def under_way(jobs: int) -> bool:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            return f"polyphase_gateway_queued_jobs {jobs:.1f}" in (await http.get(f"{url}/metrics")).text

    # The text is kept for a while: it must not be of an earlier job.
    await until(lambda: under_way(0), 60, "no job to be under way")
    stream = asyncio.create_task(api.stream(Ask([token] * 2000, 4, f"leaving-{token}")))
    await until(lambda: under_way(1), 60, "the job to be under way")
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    sent.outcomes["cancelled"] += 1


async def flip(running: RunningSuite) -> None:
    async with running.suite.monitor() as monitor:
        await monitor.flip("d1")
        await monitor.flip("d1")


async def _answering(prom: Prometheus, processes: int) -> bool:
    return await prom.number("sum(up)") == processes


async def _seen(prom: Prometheus, sent: Sent) -> bool:
    return await prom.number("sum(polyphase_jobs_total)") >= sent.jobs


async def _scraped(prom: Prometheus, since_s: float) -> bool:
    targets = (await prom.get("targets"))["activeTargets"]
    return all(datetime.fromisoformat(one["lastScrape"]).timestamp() > since_s for one in targets)


async def test_every_process_is_found_once_and_under_its_name(scene: Scene) -> None:
    found = {one["labels"]["process"]: one for one in (await scene.prometheus.get("targets"))["activeTargets"]}
    assert set(found) == {spec.name for spec in scene.running.plan.processes}
    assert {one["health"] for one in found.values()} == {"up"}
    assert {name for name, one in found.items() if one["labels"].get("instance_id") == name} == {"p0", "d0", "d1"}
    addresses = {name: one["labels"]["instance"] for name, one in found.items()}
    file = json.loads((scene.running.suite.data_dir / "prometheus.json").read_text())
    assert {group["labels"]["process"]: group["targets"][0] for group in file} == addresses
    labels = {
        name: {k: v for k, v in one["labels"].items() if k not in ("instance", "job")} for name, one in found.items()
    }
    assert {group["labels"]["process"]: group["labels"] for group in file} == labels


async def test_sums_equal_the_load_generators(scene: Scene) -> None:
    prom, sent = scene.prometheus, scene.sent
    assert await prom.by("outcome", "sum by (outcome) (polyphase_jobs_total)") == dict(sent.outcomes)
    reasons = await prom.by("finished_reason", "sum by (finished_reason) (vllm:request_success_total)")
    assert reasons == {"length": sent.outcomes["length"], "abort": sent.outcomes["cancelled"]}
    completed = sent.outcomes["length"]
    judged = await prom.query("sum by (slo, met) (polyphase_slo_requests_total) > 0")
    met = {(labels["slo"], labels["met"]): count for labels, count in judged}
    assert met == {("default", "yes"): sent.slos["default"], ("strict", "no"): sent.slos["strict"]}
    served = "sum by (status) (http_requests_total{handler='/v1/completions'})"
    statuses = await prom.by("status", served)
    assert statuses["4xx"] == sent.statuses["4xx"]
    assert statuses["2xx"] - sent.statuses["2xx"] in range(sent.outcomes["cancelled"] + 1)  # as far as they had begun
    expected = {
        "vllm:prompt_tokens_total": sent.prompt_tokens,
        "vllm:generation_tokens_total": sent.generated_tokens,
        "vllm:time_to_first_token_seconds_count": completed,
        "vllm:e2e_request_latency_seconds_count": completed,
        "vllm:request_prompt_tokens_sum": sent.prompt_tokens,
        "vllm:request_generation_tokens_sum": sent.generated_tokens,
        "vllm:request_params_n_sum": completed,
        "vllm:request_params_n_count": sent.statuses["2xx"],
        "vllm:inter_token_latency_seconds_count": sent.generated_tokens - completed,
        "polyphase_kv_imports_total{outcome='pulled', transport='emulated', codec='raw'}": sent.transfers,
        "polyphase_kv_import_seconds_count": sent.transfers,
        "polyphase_instance_flips_total": 2,
        "polyphase_operations_total{kind='flip', result='succeeded'}": 2,
    }
    assert {expr: await prom.number(f"sum({expr})") for expr in expected} == expected
    placed = await prom.number("sum(polyphase_scheduler_placements_total)")
    assert placed - completed in range(sent.outcomes["cancelled"] + 1)
    assert await prom.number("count(vllm:generation_tokens_total > 0)") == 2  # each gateway has its share


async def test_every_query_of_our_dashboard_answers(scene: Scene) -> None:
    for expr in panel_queries():
        query = partial(scene.prometheus.query, expr.replace("$__rate_interval", WINDOW))
        await query()
        if not any(silent in expr for silent in SILENT):
            await until(query, 60, expr)  # a rate wants two scrapes


async def test_every_query_of_vllms_dashboard_answers(scene: Scene) -> None:
    for expr in vllm_queries(MODEL, WINDOW):
        assert await scene.prometheus.query(expr), expr


async def test_every_rule_is_evaluated_and_missed_targets_alarm(scene: Scene) -> None:
    groups = (await scene.prometheus.get("rules"))["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in evaluated} == {rule.get("alert") or rule["record"] for rule in rules()}
    assert {(rule["health"], rule.get("lastError", "")) for rule in evaluated} == {("ok", "")}
    alarms = [alert["labels"] for alert in (await scene.prometheus.get("alerts"))["alerts"]]
    burns = [("PolyphaseSloBurnsFast", "strict"), ("PolyphaseSloBurnsSlowly", "strict")]
    assert sorted((labels["alertname"], labels.get("slo", "")) for labels in alarms) == burns
    for rule in rules():
        await scene.prometheus.query(rule["expr"])


async def test_instances_report_their_accelerators(scene: Scene) -> None:
    joined = "vllm:num_requests_running * on (instance) group_left (accelerator, emulated) polyphase_instance_info"
    found = await scene.prometheus.query(joined)
    described = {(labels["instance_id"], labels["accelerator"], labels["emulated"]) for labels, _ in found}
    assert described == {(name, "A100-SXM-80", "true") for name in ("p0", "d0", "d1")}


async def test_all_exposed_series_are_valid_and_documented(scene: Scene, tmp_path: Path) -> None:
    known = {name for text in (await expositions(tmp_path)).values() for name in samples(text)}
    known.add("polyphase_process_restarts_total")
    targets = (await scene.prometheus.get("targets"))["activeTargets"]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for target in targets:
            text = (await http.get(target["scrapeUrl"])).text
            assert complaints(text) == [], target["scrapeUrl"]
            assert samples(text) - known == set(), target["scrapeUrl"]


async def test_a_restart_of_a_process_is_counted(scene: Scene) -> None:
    restarts = "polyphase_process_restarts_total{process='d1'}"
    assert await scene.prometheus.query(restarts) != []
    assert await scene.prometheus.number(restarts) == 0
    await scene.running.suite.restarted("d1", scene.running.suite.kill("d1"))

    async def counted() -> bool:
        return await scene.prometheus.number(restarts) == 1

    await until(counted, 60, "the restart to be scraped")
