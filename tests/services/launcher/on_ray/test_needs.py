"""What an instance asks of a Ray node."""

from typing import Any

import pytest

from services.launcher.cluster_sections import InstanceSection
from services.launcher.on_ray.suite import needs_of
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest


def entry(accelerator: str, **more: Any) -> InstanceSection:
    return InstanceSection.model_validate({"id": "i", "role": "prefill", "accelerator": accelerator, **more})


def settings(accelerator: str, **more: Any) -> WorkerSettings:
    ports = {"rpc_port": 1, "http_port": 2, "kv_port": 3}
    urls = {"monitor_url": "http://m", "heartbeat_address": "tcp://m:1", "broadcast_address": "tcp://m:2"}
    return WorkerSettings(instance_id="i", model="m", accelerator=accelerator, **ports, **urls, **more)


@pytest.mark.parametrize(
    ("accelerator", "more", "bundle"),
    [
        ("cpu", {"threads": 4}, {"CPU": 4.0}),
        ("A100-SXM-80", {}, {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}),
        ("A10G", {"tensor_parallel": 4}, {"CPU": 1.0, "GPU": 4.0, "accelerator_type:A10G": 0.001}),
        (
            "L40S",
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            {"CPU": 1.0, "GPU": 4.0, "accelerator_type:L40S": 0.001},
        ),
        ("MI300X", {}, {"CPU": 1.0, "GPU": 1.0, "accelerator_type:AMD-Instinct-MI300X-OAM": 0.001}),
        ("Ascend-910B", {}, {"CPU": 1.0, "NPU": 1.0, "accelerator_type:Ascend910B": 0.001}),
        ("A100-SXM-80", {"engine": "emulated"}, {}),
    ],
)
def test_of_accelerators_that_ray_tells_apart(accelerator: str, more: dict[str, Any], bundle: dict[str, float]) -> None:
    one = entry(accelerator)
    assert dict(needs_of(one, settings(accelerator, **more), (one, entry("A10"))).bundle) == bundle


def test_resources_of_the_file_stand_in_the_place_of_the_type() -> None:
    one = entry("RTX-4090", resources={"RTX-4090": 1})
    found = needs_of(one, settings("RTX-4090"), (one, entry("A10")))
    assert dict(found.bundle) == {"CPU": 1.0, "GPU": 1.0, "RTX-4090": 1}
    assert str(found) == "CPU 1, GPU 1, RTX-4090 1"


def test_one_kind_that_ray_does_not_know_needs_no_telling_apart() -> None:
    one = entry("RTX-4090")
    assert dict(needs_of(one, settings("RTX-4090"), (one,)).bundle) == {"CPU": 1.0, "GPU": 1.0}


def test_several_kinds_that_ray_does_not_tell_apart_are_refused() -> None:
    one = entry("RTX-4090")
    with pytest.raises(InvalidRequest, match=r"instances\.i\.resources: Ray cannot distinguish RTX-4090 from other"):
        needs_of(one, settings("RTX-4090"), (one, entry("RTX-3090-Ti")))


def test_a_file_that_chooses_devices_itself_is_refused() -> None:
    one = entry("A100-SXM-80", env={"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(InvalidRequest, match=r"instances\.i\.env\.CUDA_VISIBLE_DEVICES: with --on ray, Ray"):
        needs_of(one, settings("A100-SXM-80"), (one,))
