"""`polyphase calibrate live` on a suite of emulated instances: it finds the model that they take their times from."""

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.suite import on_free_ports
from services.launcher.cli import app
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import Suite
from services.launcher.up import running_suite
from shared.cost.rates_file import Calibration, Kind
from shared.domain.instance import InstanceInfo
from shared.errors import NotFound
from shared.wire.clients.http import WorkerAdmin
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
LINK_BYTES_S = 0.58 * 10e9 / 8


def cluster() -> Cluster:
    content = {
        "name": "calibrate test",
        "model": str(PROJECT / "models" / "demo"),
        "served_model_name": "m",
        "dashboard": {"enabled": False},
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "policies": {"split": "random"},
        "instance_defaults": {
            "engine": "emulated",
            "accelerator": "A100-SXM-80",
            "kv_cache_bytes": 8 << 30,
            "emulated_link_gbps": 10,
        },
        "instances": [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode"}],
    }
    return on_free_ports(Cluster.model_validate(patient(content)))


async def infos(suite: Suite) -> list[InstanceInfo]:
    return [entry.info for entry in (await suite.instances()).values()]


async def test_it_finds_the_emulated_times_again(tmp_path: Path) -> None:
    out = tmp_path / "calibration.yaml"
    async with running_suite(cluster(), tmp_path / "data", Console(stderr=True)) as running:
        where = ["--data-dir", str(tmp_path / "data"), "--out", str(out), "--json"]
        answer = await asyncio.to_thread(CliRunner().invoke, app, ["calibrate", "live", *where])
        assert answer.exit_code == 0, answer.output
        assert json.loads(answer.stdout.splitlines()[-1])["ok"]
        instances = await infos(running.suite)
        async with running.suite.monitor() as monitor:
            split = (await monitor.policies()).policies["split"]
            assert (split.name, split.changed) == ("random", None)  # put back
        async with WorkerAdmin(instances[0].http) as worker:
            page = await worker.steps(0, 3)
            assert [step.number for step in page.steps] == [0, 1, 2]
    found = Calibration.read(out)
    known = found.for_kind(Kind.from_info(instances[0], 1))
    assert set(known.instances) == {"p", "d"}
    assert known.mape_percent < 30
    assert known.rates.step is not None
    assert instances[0].rates.step is not None
    assert known.rates.step.prefill_s(500, 0) == pytest.approx(instances[0].rates.step.prefill_s(500, 0), rel=0.5)
    assert LINK_BYTES_S / 3 < found.control.link_bytes_s < 3 * LINK_BYTES_S
    control = found.control
    assert min(control.gateway_s, control.hop_s, control.token_s) >= 0
    assert 0 < control.gateway_s + control.hop_s < 1.0
    assert 0 < control.token_s < 1.0
    with pytest.raises(NotFound):
        found.for_kind(Kind.from_info(instances[0], 2))
