"""One owner and one meaning a series, vLLM's names only with vLLM's labels, and names as Prometheus wants them."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway import job, metrics
from gateway.metrics import GatewayMetrics
from shared.domain.job import Phase
from shared.timeline import Span
from shared.wire.messages import TokenStep
from tests.services.expositions import expositions, gateway
from tests.services.global_scheduler.gateways import make_job

# Each process's own plumbing: any that has a database queue or sockets tells of its own, and a sum over them is one.
PLUMBING = ("process_", "polyphase_build_info", "polyphase_process_", "polyphase_store_", "polyphase_wire_dropped")


def families(exposition: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition)}


async def test_no_series_has_two_owners(tmp_path: Path) -> None:
    owners = {service: set(families(said)) for service, said in (await expositions(tmp_path)).items()}
    assert all(len(names) > 4 for names in owners.values()), owners
    counts = Counter(name for names in owners.values() for name in names if not name.startswith(PLUMBING))
    twice = {name: [who for who, names in owners.items() if name in names] for name, n in counts.items() if n > 1}
    assert twice == {}
    of_vllm = {who for who, names in owners.items() if any(name.startswith("vllm:") for name in names)}
    assert of_vllm == {"gateway", "worker"}


async def test_vllms_names_have_vllms_labels(tmp_path: Path) -> None:
    for service, said in (await expositions(tmp_path)).items():
        for name, family in families(said).items():
            if name.startswith("vllm:"):
                for sample in family.samples:
                    labels = set(sample.labels) - {"le"}
                    extra = {"finished_reason"} if name == "vllm:request_success" else set()
                    assert labels == {"model_name", "engine"} | extra, f"{service}: {name}"
                    assert sample.labels["engine"] == "0"


async def test_promtool_has_nothing_against_names_and_types(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    assert complaints("# HELP seconds Bad.\n# TYPE seconds counter\nseconds 1\n")
    for service, said in (await expositions(tmp_path)).items():
        assert complaints(said) == [], service


def complaints(exposition: str) -> list[str]:
    """Of promtool, but for the colon in vLLM's names, which are vLLM's."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 3), done.stderr
    colon = "metric names should not contain ':'"
    return [line for line in done.stderr.splitlines() if not (line.startswith("vllm:") and line.endswith(colon))]


def test_buckets_are_those_of_vllm() -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets")
    assert job.GAP_BOUNDS_S == buckets.INTER_TOKEN_LATENCY_BUCKETS
    assert metrics.TTFT == buckets.TIME_TO_FIRST_TOKEN_BUCKETS
    assert metrics.LATENCY == buckets.REQUEST_LATENCY_BUCKETS
    assert metrics.PARAMS_N == buckets.REQUEST_PARAMS_N_BUCKETS
    for most in (1, 7, 2048, 131_072):
        assert list(metrics.token_buckets(most)) == buckets.build_1_2_5_buckets(most)


@pytest.mark.parametrize(
    ("phase", "outcome", "reason"),
    [
        (Phase.COMPLETED, "stop", "stop"),
        (Phase.COMPLETED, "length", "length"),
        (Phase.COMPLETED, "repetition", "repetition"),
        (Phase.CANCELLED, "cancelled", "abort"),
        (Phase.FAILED, "peer_lost", "error"),
    ],
)
def test_finished_reasons_are_those_of_vllm(phase: Phase, outcome: str, reason: str) -> None:
    registry = CollectorRegistry()
    metrics, job = GatewayMetrics("demo", registry), make_job("j")
    job.phase = phase
    job.record(Span.QUEUE, 1.0, 2.0)
    job.accept(TokenStep([1]))
    metrics.ended(job, job.report(outcome))
    said = generate_latest(registry).decode()
    assert f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="demo"}} 1.0' in said
    assert 'vllm:request_queue_time_seconds_sum{engine="0",model_name="demo"} 1.0' in said
    assert f'polyphase_jobs_total{{outcome="{outcome}",slo="default"}} 1.0' in said


def test_what_is_refused_for_load_is_no_request_of_an_engine() -> None:
    said = gateway()
    assert 'polyphase_jobs_total{outcome="overloaded",slo="default"} 1.0' in said
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0' in said
    assert "vllm:prompt_tokens_total{" in said
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0' in said
