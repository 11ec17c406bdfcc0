"""From a cluster file to the processes of one host: settings, ports, links, time limits and scrape targets."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from dashboard.dashboard_settings import DashboardSettings
from gateway.settings import GatewaySettings
from gateway.table import shared_table
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import addresses, display, ports
from services.launcher.addresses import make_shared_table, on_hosts
from services.launcher.cluster_file import Cluster
from services.launcher.plan import CAPTURE_S, FETCH_S, READ_BYTES_S, links_between, make_plan, processes_at, start_s_of
from services.launcher.spec import Plan, ProcessSpec
from services.planner.settings import PlannerSettings
from services.worker.settings import DATA_PARALLEL_PORTS, WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings
from tests.services.worker.test_settings import settings

CURVE = {"curve_public": "p" * 40, "curve_secret": "s" * 40}
TOKEN = {"cluster_token": "t" * 20}
INSTANCES = [
    {"id": "p", "role": "prefill", "engine": "emulated", "tensor_parallel": 2},
    {"id": "d", "role": "decode", "engine": "emulated", "env": {"OMP_NUM_THREADS": "3"}},
]


def cluster(**changes: Any) -> Cluster:
    return Cluster.model_validate({"name": "c", "model": "org/m", "instances": INSTANCES, **changes})


def process(plan: Plan, name: str) -> ProcessSpec:
    return next(each for each in plan.processes if each.name == name)


def loaded(kind: type[ServiceSettings], spec: ProcessSpec, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the process would read from its environment."""
    for key in list(os.environ):
        if key.startswith("POLYPHASE_"):
            monkeypatch.delenv(key)
    for key, value in spec.env.items():
        monkeypatch.setenv(key, value)
    return kind.load()


def test_every_process_is_there_once(tmp_path: Path) -> None:
    plan = make_plan(cluster(), tmp_path)
    assert [each.name for each in plan.processes] == [
        "monitor",
        "scheduler",
        "gateway",
        "predictor",
        "planner",
        "p",
        "d",
        "dashboard",
    ]
    assert plan.instance_ids == ("p", "d")


def test_gateway_scheduler_and_monitor_may_be_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"gateway": {"env": {"A": "1"}}, "scheduler": {"env": {"B": "2"}}, "monitor": {"silence_s": 0.9}}
    apart, plan = (make_plan(cluster(**sections, one_process=one), tmp_path) for one in (False, True))
    assert apart.started == apart.processes
    assert [each.name for each in plan.processes] == [each.name for each in apart.processes]  # each is described
    assert [each.name for each in plan.started] == ["control", "predictor", "planner", "p", "d", "dashboard"]
    control = plan.started[0]
    assert control.argv[-1] == "services.control"
    assert control.health_url == process(plan, "gateway").health_url
    assert (control.env["A"], control.env["B"]) == ("1", "2")
    names = ("monitor", "scheduler", "gateway")
    assert set(control.ports) == {use for name in names for use in process(apart, name).ports}
    for name, kind in zip(names, (MonitorSettings, SchedulerSettings, GatewaySettings), strict=True):
        assert loaded(kind, control, monkeypatch) == process(apart, name).settings


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"monitors": 2}, "monitors: with `one_process` there is one, got 2"),
        ({"scheduler": {"count": 2}}, "scheduler.count: with `one_process` there is one, got 2"),
        ({"gateway": {"processes": 3}}, "gateway.processes: with `one_process` there is one, got 3"),
        ({"gateway": {"enabled": False}}, "gateway.enabled: `one_process` needs a gateway"),
        ({"monitor": {"peer_silence_s": 9}}, "monitor.peer_silence_s: with `one_process` it must be the gateway's"),
    ],
)
def test_one_process_has_one_of_each(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(fault)):
        cluster(one_process=True, **changes)
    assert cluster(**changes)


def test_one_process_is_not_for_other_systems(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="one_process: it is for `polyphase up`"):
        processes_at(cluster(one_process=True), tmp_path, "file", on_hosts(cluster()))


@pytest.mark.parametrize("keys", [True, False])
def test_the_example_call_carries_a_key_where_one_is_needed(tmp_path: Path, keys: bool) -> None:
    gateway = {"api_keys_file": str(tmp_path / "keys.yaml")} if keys else {}
    shown = io.StringIO()
    display.welcome(Console(file=shown, width=200), make_plan(cluster(gateway=gateway), tmp_path), 1.0, 0)
    assert ("Authorization: Bearer" in shown.getvalue()) is keys


def test_addresses_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(cluster(scheduler={"count": 2}, ports=20000), tmp_path)
    monitor = loaded(MonitorSettings, process(plan, "monitor"), monkeypatch)
    gateway = loaded(GatewaySettings, process(plan, "gateway"), monkeypatch)
    schedulers = [loaded(SchedulerSettings, process(plan, f"scheduler-{i}"), monkeypatch) for i in range(2)]
    predictor = loaded(PredictorSettings, process(plan, "predictor"), monkeypatch)
    workers = [loaded(WorkerSettings, process(plan, name), monkeypatch) for name in ("p", "d")]
    assert gateway.schedulers == tuple(each.rpc_address for each in schedulers)
    assert len({each.scheduler_id for each in schedulers}) == 2
    for each in (*schedulers, *workers):
        assert each.broadcast_address == monitor.broadcast_address
        assert each.monitor_url == plan.monitor_url == f"http://127.0.0.1:{monitor.http_port}"
    for scheduler in schedulers:
        assert scheduler.predictor_urls == (plan.predictor_url,) == (f"http://127.0.0.1:{predictor.port}",)
    assert gateway.predictors == (predictor.rpc_address,)
    planner = loaded(PlannerSettings, process(plan, "planner"), monkeypatch)
    assert (planner.broadcast_address, planner.monitor_url) == (monitor.broadcast_address, plan.monitor_url)
    assert plan.planner_url == f"http://127.0.0.1:{planner.http_port}"
    assert process(plan, "dashboard").env["POLYPHASE_DASHBOARD_PLANNER_URL"] == plan.planner_url
    for worker in workers:
        assert worker.heartbeat_address == monitor.heartbeat_address
    assert plan.scheduler_urls == tuple(f"http://127.0.0.1:{each.http_port}" for each in schedulers)
    assert monitor.database_url == schedulers[0].database_url == f"sqlite:///{tmp_path}/polyphase.db"


def test_everybody_knows_every_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(cluster(monitors=3, scheduler={"count": 16}, predictor={"count": 16}), tmp_path)
    ports.check_distinct(plan.port_uses)
    monitors = [loaded(MonitorSettings, process(plan, f"monitor-{i}"), monkeypatch) for i in range(3)]
    assert [one.monitor_id for one in monitors] == ["monitor-0", "monitor-1", "monitor-2"]
    assert {one.lease_s for one in monitors} == {1.0}
    assert plan.monitor_url == ",".join(one.url for one in monitors)
    scheduler = loaded(SchedulerSettings, process(plan, "scheduler-0"), monkeypatch)
    worker = loaded(WorkerSettings, process(plan, "d"), monkeypatch)
    planner = loaded(PlannerSettings, process(plan, "planner"), monkeypatch)
    for each in (scheduler, worker, planner):
        assert each.monitor_url == plan.monitor_url
        assert each.broadcast_address == ",".join(one.broadcast_address for one in monitors)
    assert worker.heartbeat_address == ",".join(one.heartbeat_address for one in monitors)
    for key, value in process(plan, "dashboard").env.items():
        if key.startswith("POLYPHASE_DASHBOARD_"):
            monkeypatch.setenv(key, value)
    assert DashboardSettings.load().monitor_url == plan.monitor_url


def test_a_dashboard_with_a_login_has_the_gateways_keys(tmp_path: Path) -> None:
    keys, name = tmp_path / "keys.yaml", "POLYPHASE_DASHBOARD_API_KEYS_FILE"
    file = {"gateway": {"api_keys_file": str(keys)}}
    assert name not in process(make_plan(cluster(**file), tmp_path), "dashboard").env
    with_login = make_plan(cluster(dashboard={"login": True}, **file), tmp_path)
    assert process(with_login, "dashboard").env[name] == str(keys)


def test_a_monitor_that_is_alone_needs_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = loaded(MonitorSettings, process(make_plan(cluster(), tmp_path), "monitor"), monkeypatch)
    assert (monitor.lease_s, monitor.monitor_id) == (0.0, "monitor")


@pytest.mark.parametrize("count", [2, 16])
def test_gateway_and_schedulers_know_every_replica_of_the_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    plan = make_plan(cluster(predictor={"count": count}, scheduler={"count": 16}), tmp_path)
    specs = [process(plan, f"predictor-{index}") for index in range(count)]
    replicas = [loaded(PredictorSettings, spec, monkeypatch) for spec in specs]
    gateway = loaded(GatewaySettings, process(plan, "gateway"), monkeypatch)
    scheduler = loaded(SchedulerSettings, process(plan, "scheduler-15"), monkeypatch)
    assert gateway.predictors == tuple(each.rpc_address for each in replicas)
    assert scheduler.predictor_urls == tuple(f"http://127.0.0.1:{each.port}" for each in replicas)
    assert [spec.health_url for spec in specs] == [f"{url}/health" for url in scheduler.predictor_urls]
    assert process(plan, "dashboard").env["POLYPHASE_DASHBOARD_PREDICTOR_URL"] == plan.predictor_url
    assert plan.predictor_url == scheduler.predictor_urls[0]


def test_without_a_predictor_nobody_knows_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(cluster(predictor={"enabled": False, "count": 3}), tmp_path)
    assert not [each.name for each in plan.processes if "predictor" in each.name]
    assert loaded(GatewaySettings, process(plan, "gateway"), monkeypatch).predictors == ()
    assert loaded(SchedulerSettings, process(plan, "scheduler"), monkeypatch).predictor_urls == ()
    assert plan.predictor_url == ""


@pytest.mark.parametrize(("said", "meant"), [("sequential",) * 2, ("parallel",) * 2, ("off",) * 2, (False, "off")])
def test_how_lengths_are_asked_for_reaches_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: object, meant: str
) -> None:
    """A plain `off` is a boolean in YAML."""
    plan = make_plan(cluster(gateway={"predict": said}), tmp_path)
    assert loaded(GatewaySettings, process(plan, "gateway"), monkeypatch).predict == meant
    assert "predictor" in [each.name for each in plan.processes]


def test_settings_of_the_file_reach_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"gateway": {"max_queued_jobs": 7, "slo": {"default": {"ttft_s": 0.5}}}, "policies": {"split": "none"}}
    plan = make_plan(cluster(**changes, **CURVE), tmp_path)
    gateway = loaded(GatewaySettings, process(plan, "gateway"), monkeypatch)
    assert (gateway.max_queued_jobs, gateway.slo["default"].ttft_s) == (7, 0.5)
    assert gateway.curve_public == CURVE["curve_public"]
    assert loaded(MonitorSettings, process(plan, "monitor"), monkeypatch).policies == {"split": "none"}
    assert process(plan, "d").env["OMP_NUM_THREADS"] == "3"


def test_consent_to_code_of_the_model_reaches_all_that_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, type[Any]] = {"gateway": GatewaySettings, "predictor": PredictorSettings, "p": WorkerSettings}
    for trusted in (False, True):
        plan = make_plan(cluster(trust_remote_code=trusted), tmp_path)
        for name, kind in kinds.items():
            assert loaded(kind, process(plan, name), monkeypatch).trust_remote_code is trusted
    with pytest.raises(ValidationError, match="it belongs to the whole cluster"):
        cluster(gateway={"trust_remote_code": True})
    for changes in (
        {"gateway": {"vllm_args": {"trust-remote-code": True}}},
        {"instances": [{**INSTANCES[0], "engine_args": {"trust_remote_code": True}}]},
    ):
        with pytest.raises(InvalidRequest, match="it is a setting of its own, `trust_remote_code`"):
            make_plan(cluster(**changes), tmp_path)


@pytest.mark.parametrize(
    ("gateway", "lossy"),
    [
        ({}, False),
        ({"kv_codec": "raw", "slo": {"fast": {}}}, False),
        ({"kv_codec": "int8"}, True),
        ({"slo": {"fast": {"ttft_s": 1.0}, "cheap": {"lossy_kv": "int4"}}}, True),
    ],
)
def test_instances_load_codecs_where_a_class_allows_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateway: dict[str, Any], lossy: bool
) -> None:
    plan = make_plan(cluster(gateway=gateway), tmp_path)
    assert loaded(WorkerSettings, process(plan, "d"), monkeypatch).lossy_kv == lossy


def test_the_users_environment_does_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_WORKER_BLOCK_SIZE", "999")
    monkeypatch.setenv("POLYPHASE_GATEWAY_PORT", "1")
    plan = make_plan(cluster(), tmp_path)
    assert plan.api_url.endswith(":8000")
    assert "POLYPHASE_WORKER_BLOCK_SIZE" not in process(plan, "p").env


def test_a_gateway_that_listens_everywhere_is_reached_on_this_host(tmp_path: Path) -> None:
    plan = make_plan(cluster(gateway={"host": "0.0.0.0"}), tmp_path)
    assert plan.api_url == "http://127.0.0.1:8000"
    assert process(plan, "gateway").health_url == "http://127.0.0.1:8000/health"
    assert process(plan, "gateway").ports[0].host == "0.0.0.0"


def test_children_are_told_not_to_phone_home(tmp_path: Path) -> None:
    plan = make_plan(cluster(model=str(tmp_path)), tmp_path)
    for each in plan.processes:
        assert each.env["VLLM_NO_USAGE_STATS"] == each.env["DO_NOT_TRACK"] == "1"
        assert each.env["HF_HUB_OFFLINE"] == "1"


def test_emulated_instances_may_have_a_context_beyond_the_tokenizers_model(tmp_path: Path) -> None:
    """`polyphase plan` imitates models with 8,192 tokens on a tokenizer's folder of 4,096."""
    key = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    assert process(make_plan(cluster(max_model_len=8192), tmp_path), "gateway").env[key] == "1"
    mixed = [*INSTANCES[:1], {**INSTANCES[1], "engine": "vllm"}]
    assert key not in process(make_plan(cluster(instances=mixed), tmp_path), "gateway").env


def test_data_parallel_ranks_are_processes_with_ports_of_their_own_that_meet_at_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = {"id": "d", "role": "decode", "engine": "emulated", "count": 2, "data_parallel": 2, "tensor_parallel": 2}
    plan = make_plan(cluster(instances=[INSTANCES[0], decode]), tmp_path)
    assert plan.instance_ids == ("p", "d-0.0", "d-0.1", "d-1.0", "d-1.1")
    found = {name: loaded(WorkerSettings, process(plan, name), monkeypatch) for name in plan.instance_ids}
    ranks = [(each.rank_of, each.data_parallel, each.data_parallel_rank) for each in found.values()]
    assert ranks == [("", 1, 0), ("d-0", 2, 0), ("d-0", 2, 1), ("d-1", 2, 0), ("d-1", 2, 1)]
    assert found["p"].data_parallel_port == 0
    meeting = [found[name].data_parallel_port for name in plan.instance_ids[1:]]
    assert meeting[0] == meeting[1] != meeting[2] == meeting[3]
    assert found["d-0.0"].kv_port + 2 == meeting[0]
    taken = [use.port for use in plan.port_uses]
    assert set(range(meeting[0], meeting[0] + DATA_PARALLEL_PORTS)) <= set(taken)
    assert len(taken) == len(set(taken))


def test_no_other_instance_has_the_name_of_one_with_ranks_or_of_a_rank() -> None:
    for other in ("d", "d.1"):
        with pytest.raises(ValidationError, match=f"another instance already has the name '{re.escape(other)}'"):
            cluster(instances=[{"id": "d", "role": "decode", "data_parallel": 2}, {"id": other, "role": "prefill"}])


def test_a_rank_each_has_its_kv_port(tmp_path: Path) -> None:
    plan = make_plan(cluster(), tmp_path)
    assert len(process(plan, "p").ports) == 4  # rpc, http, two ranks
    ports = [use.port for use in plan.port_uses]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gateway": {"max_body_bytes": -1}}, ("file.yaml", "gateway.max_body_bytes")),
        ({"instances": [{**INSTANCES[0], "block_size": "x"}]}, ("file.yaml", "instances.p.block_size")),
        ({"scheduler": {"queue_rows": 0}}, ("file.yaml", "scheduler.queue_rows")),
        ({"gateway": {"predict": "on"}}, ("file.yaml", "gateway.predict", "sequential")),
        ({"gateway": {"port": 18100}}, ("18100", "monitor", "gateway")),
        ({"ports": 65530}, ("65535",)),
    ],
)
def test_bad_values_are_named(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as error:
        make_plan(cluster(**changes), tmp_path, where="file.yaml")
    for word in words:
        assert word in error.value.message


@pytest.mark.parametrize(
    ("changes", "forked"),
    [
        ({"engine": "vllm", "accelerator": "cpu"}, True),
        ({"engine": "vllm", "accelerator": "A10"}, False),  # CUDA does not survive a fork
        ({"engine": "vllm", "accelerator": "cpu", "tensor_parallel": 2}, False),
        ({"engine": "vllm", "accelerator": "cpu", "pipeline_parallel": 2}, False),
        ({"engine": "vllm", "accelerator": "cpu", "threads": 2}, False),
        ({"engine": "vllm", "accelerator": "cpu", "env": {"A": "b"}}, False),  # may matter at import
        ({"engine": "emulated"}, False),
    ],
)
def test_only_what_survives_a_fork_is_forked(tmp_path: Path, changes: dict[str, Any], forked: bool) -> None:
    plan = make_plan(cluster(instances=[{"id": "x", "role": "prefill", **changes}]), tmp_path)
    assert process(plan, "x").module == ("services.worker" if forked else "")
    assert process(plan, "gateway").module == "gateway"
    assert ("services.worker.app" in plan.preload) is forked
    assert "gateway.app" in plan.preload
    assert not any(key.startswith("POLYPHASE_") for key in plan.fork_env or ())


COMPILES = """
import importlib, sys, torch
for module in sys.argv[1:]:
    importlib.import_module(module)
from torch._dynamo.utils import counters
from vllm.v1.sample import sampler
sampler.batched_count_greater_than(torch.zeros(2, 3), torch.zeros(2, 1))
print("compiled", counters["frames"]["total"])
"""


@pytest.mark.slow
def test_a_forked_engine_compiles_nothing_for_its_first_log_probabilities(tmp_path: Path) -> None:
    plan = make_plan(cluster(instances=[{"id": "x", "role": "prefill", "engine": "vllm"}]), tmp_path)
    argv = [sys.executable, "-c", COMPILES, *plan.preload]
    done = subprocess.run(argv, env=plan.fork_env, capture_output=True, text=True, timeout=300, check=False)
    assert "compiled 0" in done.stdout, done.stdout + done.stderr


def test_where_nothing_can_be_forked_there_is_no_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_plan(cluster(), tmp_path).fork_env is not None
    assert make_plan(cluster(gateway={"enabled": False}), tmp_path).fork_env is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert make_plan(cluster(), tmp_path).fork_env is None


def hosts() -> Cluster:
    instances = [{**INSTANCES[0], "host": "a"}, {**INSTANCES[1], "host": "b"}]
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    return cluster(hosts=addresses, control="a", instances=instances, predictor={"count": 2}, **CURVE, **TOKEN)


def test_a_host_runs_what_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, other = make_plan(hosts(), tmp_path, "a"), make_plan(hosts(), tmp_path, "b")
    assert {"predictor-0", "predictor-1"} <= {each.name for each in head.processes}
    assert loaded(PredictorSettings, process(head, "predictor-1"), monkeypatch).rpc_address.startswith(
        "tcp://10.0.0.1:"
    )
    assert head.runs_control
    assert "d" not in [each.name for each in head.processes]
    assert [each.name for each in other.processes] == ["d"]
    worker = loaded(WorkerSettings, process(other, "d"), monkeypatch)
    assert worker.host == "10.0.0.2"
    assert worker.monitor_url == head.monitor_url == "http://10.0.0.1:18100"
    assert worker.kv_endpoints[0].startswith("kv://10.0.0.2:")


def test_with_several_hosts_one_must_say_which(tmp_path: Path) -> None:
    for name in ("", "c"):
        with pytest.raises(InvalidRequest, match="a, b"):
            make_plan(hosts(), tmp_path, name)


def test_processes_of_the_gateway_share_its_port_and_each_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {"record_lengths": str(tmp_path / "lengths.jsonl"), "record_bytes": 1 << 20}
    plan = make_plan(cluster(gateway={"processes": 3, "port": 8123, **records}, ports=20000), tmp_path)
    specs = [process(plan, f"gateway-{index}") for index in range(3)]
    settings = [loaded(GatewaySettings, spec, monkeypatch) for spec in specs]
    assert plan.api_url == "http://127.0.0.1:8123"
    assert [(each.port, each.process, each.processes) for each in settings] == [(8123, n, 3) for n in range(3)]
    assert len({each.gateway_id for each in settings}) == 3
    assert plan.gateway_urls == tuple(f"http://127.0.0.1:{each.own_port}" for each in settings)
    assert [spec.health_url for spec in specs] == [f"{url}/health" for url in plan.gateway_urls]
    assert json.loads(process(plan, "dashboard").env["POLYPHASE_DASHBOARD_GATEWAY_URLS"]) == [*plan.gateway_urls]
    assert {each.shared_table for each in settings} == {tmp_path / "gateways.table"}
    assert [each.record_lengths.name for each in settings] == [f"lengths-{n}.jsonl" for n in range(3)]
    assert {each.record_bytes for each in settings} == {(1 << 20) // 3}
    make_shared_table(plan)
    with shared_table(settings[2]) as table:
        assert table is not None
        assert table.processes == 3


def test_one_process_of_the_gateway_is_as_if_there_were_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(cluster(gateway={"processes": 1}), tmp_path)
    settings = loaded(GatewaySettings, process(plan, "gateway"), monkeypatch)
    assert (settings.processes, settings.own_port, settings.shared_table) == (1, 0, None)
    assert plan.gateway_urls == (plan.api_url,)
    make_shared_table(plan)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["process", "own_port", "shared_table", "gateway_id"])
def test_what_follows_from_the_number_of_processes_cannot_be_said(key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key}: it is derived from the rest"):
        cluster(gateway={"processes": 2, key: 1})


def test_engines_have_the_gateways_reasoning_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where structured output begins is theirs to find. One of an instance's own stays."""
    instances = [
        {"id": "p", "role": "prefill"},
        {"id": "d", "role": "decode", "engine_args": {"reasoning_parser": "own", "seed": 1}},
        {"id": "e", "role": "decode", "engine": "emulated"},
    ]
    gateway = {"vllm_args": {"reasoning-parser": "qwen3", "tool_call_parser": "hermes"}}
    plan = make_plan(cluster(instances=instances, gateway=gateway), tmp_path)
    found = {name: loaded(WorkerSettings, process(plan, name), monkeypatch).engine_args for name in ("p", "d", "e")}
    assert found == {"p": {"reasoning_parser": "qwen3"}, "d": {"reasoning_parser": "own", "seed": 1}, "e": {}}


def test_engines_end_reasoning_and_begin_structured_output_as_the_gateways_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "reasoning-config": '{"reasoning_end_str": "So:</think>"}',
        "structured_outputs_config": {"backend": "xgrammar"},
        "structured-outputs-config.enable_in_reasoning": True,
        "max_logprobs": 5,
    }
    instances = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode"}]
    plan = make_plan(cluster(instances=instances, gateway={"vllm_args": options}), tmp_path)
    assert loaded(WorkerSettings, process(plan, "p"), monkeypatch).engine_args == {
        "reasoning_config": {"reasoning_end_str": "So:</think>"},
        "structured_outputs_config": {"backend": "xgrammar", "enable_in_reasoning": True},
    }


def test_a_predictor_stands_beside_each_instance_whatever_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = [{**INSTANCES[0], "host": "a"}, {**INSTANCES[1], "host": "b", "count": 2}]
    instances.append({**INSTANCES[1], "id": "off", "host": "b", "enabled": False})
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    predictor = {"beside": "prefill", "threads": 2}
    wanted = cluster(hosts=addresses, control="a", instances=instances, predictor=predictor, **CURVE, **TOKEN)
    head, other = make_plan(wanted, tmp_path, "a"), make_plan(wanted, tmp_path, "b")
    assert [each.name for each in head.processes if "predictor" in each.name] == ["predictor-p"]
    assert [each.name for each in other.processes] == ["d-0", "d-1", "predictor-d-0", "predictor-d-1"]
    ports.check_distinct((*head.port_uses, *other.port_uses))
    specs = {name: process(plan, f"predictor-{name}") for plan, name in ((head, "p"), (other, "d-0"), (other, "d-1"))}
    found = {name: loaded(PredictorSettings, spec, monkeypatch) for name, spec in specs.items()}
    assert [each.host for each in found.values()] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert {(each.device, each.threads) for each in found.values()} == {("cpu", 2)}
    gateway = loaded(GatewaySettings, process(head, "gateway"), monkeypatch)
    assert gateway.predictors == ()
    assert gateway.predictors_beside == {name: each.rpc_address for name, each in found.items()}
    scheduler = loaded(SchedulerSettings, process(head, "scheduler"), monkeypatch)
    assert scheduler.predictor_urls == tuple(f"http://{each.host}:{each.port}" for each in found.values())
    monitor = loaded(MonitorSettings, process(head, "monitor"), monkeypatch)
    scraped = [each.process for each in monitor.scrape if each.service == "predictor"]
    assert scraped == [f"predictor-{name}" for name in found]
    assert head.predictor_url == scheduler.predictor_urls[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predictor": {"beside": "prefill", "count": 2}}, "count: with `beside` each instance has one predictor"),
        ({"predictor": {"beside": "decode"}}, "Input should be 'prefill'"),
        (
            {"predictor": {"beside": "prefill"}, "instances": [{**INSTANCES[0], "id": "predictor-d"}, INSTANCES[1]]},
            "'predictor-d' is reserved for predictors",
        ),
    ],
)
def test_predictors_beside_instances_have_their_names_and_number(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cluster(**changes)


def on_nodes(network: dict[str, Any] | None, *nodes: str, **more: Any) -> Cluster:
    entry = {"role": "decode", "engine": "emulated", "accelerator": "A10", **more}
    rows = [{"id": f"i{at}", "node": node, **entry} for at, node in enumerate(nodes)]
    return Cluster.model_validate({"name": "c", "model": "m", "network": network, "instances": rows})


def test_each_hears_of_the_others_paths_alone() -> None:
    links = links_between(on_nodes({"inside": {"gbps": 100}, "between": {"gbps": 10}}, "a", "a", "b"), "c.yaml")
    assert {peer: entry.gbps for peer, entry in links["i0"].items()} == {"i1": 100.0, "i2": 10.0}
    assert {peer: entry.gbps for peer, entry in links["i2"].items()} == {"i0": 10.0, "i1": 10.0}


def test_without_nodes_there_are_no_paths() -> None:
    assert links_between(on_nodes(None, "", ""), "c.yaml") == {}


def test_real_engines_have_real_links() -> None:
    assert links_between(on_nodes({"between": {"gbps": 10}}, "a", "b", engine="vllm"), "c.yaml") == {}


def test_nodes_without_a_path_or_a_network_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"c\.yaml: network: no link between the nodes"):
        links_between(on_nodes({"inside": {"gbps": 1}}, "a", "b"), "c.yaml")
    with pytest.raises(ValueError, match=r"instances\.0\.node: the file has no `network`"):
        on_nodes(None, "a")


def test_exceptions_may_name_nodes_of_real_engines() -> None:
    network = {"inside": {"gbps": 100}, "between": {"gbps": 10}, "pairs": [{"nodes": ["a", "b"], "gbps": 1}]}
    assert links_between(on_nodes(network, "a", "b", engine="vllm"), "c.yaml") == {}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "pytorch_model.bin").open("wb") as file:
        file.truncate(141_000_000_000)  # a 70B model's in bfloat16; the file is sparse
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 300 + 141e9 / READ_BYTES_S),
        ({"accelerator": "H100-SXM"}, 300 + 141e9 / READ_BYTES_S + CAPTURE_S),
        ({"accelerator": "H100-SXM", "engine_args": {"enforce_eager": True}}, 300 + 141e9 / READ_BYTES_S),
        ({"engine": "emulated"}, 300),
    ],
)
def test_it_grows_with_the_weights(model: str, changes: dict[str, Any], expected: float) -> None:
    assert start_s_of(settings(model=model, **changes)) == pytest.approx(expected)


def test_a_model_that_has_to_be_fetched_has_half_an_hour() -> None:
    assert start_s_of(settings(model="org/model")) == FETCH_S


@pytest.mark.parametrize("said", [None, 77.0])
def test_what_the_file_says_holds_for_every_process(model: str, tmp_path: Path, said: float | None) -> None:
    launcher = {} if said is None else {"launcher": {"start_s": said}}
    instances = [{"id": "d", "role": "decode"}, {"id": "e", "role": "decode", "engine": "emulated"}]
    cluster = Cluster.model_validate({"name": "c", "model": model, "instances": instances, **launcher})
    plan = make_plan(cluster, tmp_path)
    found = {spec.name: spec.start_s for spec in plan.processes}
    assert found["d"] == plan.start_s == (said or pytest.approx(1005))
    assert found["e"] == (said or 300)
    assert found["gateway"] == found["dashboard"] == (said or 0)  # 0: as usual
    assert [(spec.name, spec.role) for spec in plan.processes if spec.may_be_late] == [("d", "decode"), ("e", "decode")]


def emulated_cluster(**changes: Any) -> Cluster:
    instance = {"engine": "emulated", "accelerator": "A100-SXM-80"}
    instances = [{"id": "p0", "role": "prefill", **instance}, {"id": "d", "role": "decode", "count": 2, **instance}]
    return Cluster.model_validate({"name": "t", "model": "m", "instances": instances, **changes})


def test_every_process_with_metrics_is_a_target_under_its_own_port(tmp_path: Path) -> None:
    plan = make_plan(emulated_cluster(gateway={"processes": 2}, scheduler={"count": 2}), tmp_path)
    found = {each.process: each for each in addresses.targets_of(plan.processes)}
    assert set(found) == {spec.name for spec in plan.processes} - {"dashboard"}
    assert len({each.url for each in found.values()}) == len(found)
    assert tuple(found[name].url for name in ("gateway-0", "gateway-1")) == plan.gateway_urls
    services = {each.service for each in found.values()}
    assert services == {"gateway", "scheduler", "monitor", "predictor", "planner", "worker"}


def test_the_monitor_is_told_of_those_that_do_not_register(tmp_path: Path) -> None:
    plan = make_plan(emulated_cluster(), tmp_path)
    (monitor,) = [spec.settings for spec in plan.processes if isinstance(spec.settings, MonitorSettings)]
    elsewhere = [each for each in addresses.targets_of(plan.processes) if each.service not in ("monitor", "worker")]
    assert list(monitor.scrape) == elsewhere


def test_the_file_has_the_labels_of_the_monitor_and_goes_with_the_suite(tmp_path: Path) -> None:
    plan = make_plan(emulated_cluster(), tmp_path)
    addresses.write_targets(tmp_path, plan.processes)
    groups = {each["labels"]["process"]: each for each in json.loads((tmp_path / addresses.TARGETS_FILE).read_text())}
    (worker,) = [spec for spec in plan.processes if spec.name == "p0"]
    address = worker.health_url.removeprefix("http://").removesuffix("/health")
    assert groups["p0"] == {"targets": [address], "labels": {"service": "worker", "process": "p0", "instance_id": "p0"}}
    assert groups["monitor"]["labels"] == {"service": "monitor", "process": "monitor"}
    addresses.remove_targets(tmp_path)
    assert list(tmp_path.iterdir()) == []
