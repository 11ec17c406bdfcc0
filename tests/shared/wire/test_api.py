"""The HTTP answers keep their field names, and decode whatever a later release adds."""

import msgspec
import pytest

from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, KvGeometry, Promised, Role
from shared.wire.api import monitor, planner, predictor, scheduler, worker

FIELDS = {
    monitor.InstanceRow: "instance_id role state state_since_s registered_s operation death connected info load",
    monitor.ClusterSummary: "time_s sequence model compatibility instances known totals operations slo",
    monitor.DemandAnswer: "demand seconds shifts roles",
    monitor.PoliciesInForce: "revision trouble policies choices followers",
    monitor.PolicyChoice: "name parameters file changed",
    monitor.PolicyFollower: "process name revision follows trouble",
    monitor.History: "from_s to_s step_s time_s series targets classes class_targets marks",
    planner.Fleet: (
        "time_s trouble instances placement routes_in_force routes demand expected measured auto why_not_auto promise"
    ),
    planner.Measured: "requests window_s attainment ttft_p50_s tpot_p50_s rate",
    planner.Promise: "rate goodput attainment ttft_mean_s tpot_mean_s usd_per_million_tokens usd_per_hour",
    planner.Proposal: (
        "state cause why flips routes changes_routes now then made_s noticed_s took_s proposal_id decided_s who steps "
        "error"
    ),
    planner.PlanSearch: "state plan_id who submitted_s ended_s error progress request result",
    planner.SearchResult: (
        "method workload groups routes policies promise compared why stopped took_s cluster_file endurance"
    ),
    predictor.LengthSource: (
        "source use why checkpoint reads_token_ids pending largest_batch fallbacks reality observed"
    ),
    scheduler.RequestRow: (
        "phase job_id gateway_id arrived_s prompt_tokens output_tokens prefill_instance decode_instance split slo "
        "outcome ttft_s tpot_s slo_met caller longest_gap_s gaps gaps_over predicted_ttft_s "
        "predicted_tpot_s"
    ),
    worker.InstanceStatus: "info role draining load flips refused chunk_size policies threads max_seqs",
    worker.InstanceDetails: (
        "instance_id started_s uptime_s versions steps rates link codecs prefixes preemptions drafted_tokens "
        "accepted_tokens"
    ),
}


@pytest.mark.parametrize("struct", FIELDS, ids=lambda struct: struct.__name__)
def test_field_names(struct: type[msgspec.Struct]) -> None:
    assert [field.encode_name for field in msgspec.structs.fields(struct)] == FIELDS[struct].split()


def row(**load: object) -> monitor.InstanceRow:
    same = Compatibility("f00d", "vllm", "1", 1, KvGeometry(6, 4, 64))
    info = InstanceInfo(
        instance_id="p0",
        generation=1,
        model="m",
        compatibility=same,
        accelerator="H100",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=100,
        max_model_len=2048,
        chunk_size=512,
        rpc="tcp://a:1",
        http="http://a:2",
        kv_endpoints=(),
    )
    reported = monitor.LoadByName.from_load(msgspec.structs.replace(InstanceLoad(time_s=1.0), **load))
    return monitor.InstanceRow(
        instance_id="p0",
        role=Role.PREFILL,
        state=InstanceState.READY,
        state_since_s=0.0,
        registered_s=0.0,
        operation="",
        death="",
        connected=True,
        info=info,
        load=reported,
    )


def test_a_load_has_field_names_down_to_its_promised_decodes() -> None:
    known = row(free_blocks=25, promised=(Promised(7, 100, 20),))
    load = msgspec.json.decode(msgspec.json.encode(known))["load"]
    assert (load["free_blocks"], load["promised"][0]["answer_tokens"]) == (25, 20)
    assert msgspec.json.decode(msgspec.json.encode(known), type=monitor.InstanceRow) == known
    assert known.kv_usage == 0.75


def test_unknown_fields_are_ignored_and_wrong_types_are_not() -> None:
    data = msgspec.json.decode(msgspec.json.encode(row()))
    assert msgspec.convert({**data, "added_later": 1}, monitor.InstanceRow) == row()
    with pytest.raises(msgspec.ValidationError, match="operation"):
        msgspec.convert({**data, "operation": 5}, monitor.InstanceRow)
