"""Instances on Ray that download weights: the token that they get, and the time that they have."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from services.launcher.on_ray import suite
from services.launcher.on_ray.suite import RayInstance, RayInstances, hub_environment
from services.launcher.supervisor import State, Status
from shared.domain.instance import Role


class Downloading:
    """An instance that is ready at its tenth refresh, and until then has just received bytes."""

    role, placed = Role.PREFILL, True

    def __init__(self) -> None:
        self.status = Status("p", Path(), State.STARTING)
        self.downloaded_mono = 0.0
        self._refreshed = 0

    async def refresh(self) -> None:
        self._refreshed += 1
        self.downloaded_mono = asyncio.get_running_loop().time() + 1000.0
        if self._refreshed == 10:
            self.status = Status("p", Path(), State.READY)

    async def stop(self) -> None:
        pass


def test_instances_get_the_hub_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    assert hub_environment() == {"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://mirror"}
    monkeypatch.setenv("HF_TOKEN", "")
    assert hub_environment() == {"HF_ENDPOINT": "http://mirror"}


async def test_the_limit_counts_from_the_last_byte_of_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "POLL_S", 0.01)
    instances = RayInstances(cast(list[RayInstance], [cast(Any, Downloading())]))
    assert await instances.started(0.0) == ("p",)
    await instances.close()
