"""Files of any content are read, or refused by name: cluster and simulation files, inventories, keys and the others."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.launcher.cluster_file import load_cluster
from services.launcher.plan import make_plan
from services.launcher.preflight import preflight
from services.launcher.render.options import RenderOptions
from shared.cost.catalogue import BUILT_IN, Catalogue
from shared.cost.efficiency import SHIPPED, EfficiencyTable
from shared.cost.library import geometry_from_file
from shared.cost.rates_file import Calibration
from shared.errors import PolyphaseError
from shared.plan.inventory import read_inventory
from shared.runtime.keys import digest_of, load_keys
from tools.simulate.deployment import load_deployment
from tools.simulate.sim_file import load_prediction

ROOT = Path(__file__).parents[3]


def check_cluster(file: Path) -> None:
    cluster = load_cluster(file)
    plan = make_plan(cluster, file.parent / "data", next(iter(cluster.hosts), ""), str(file))
    preflight(cluster, plan, str(file))


def check_accelerators(file: Path) -> None:
    for each in Catalogue.built_in().with_file(file).all():
        each.flops("bf16")


def check_efficiencies(file: Path) -> None:
    table = EfficiencyTable.from_file(file)
    for name in table.fitted():
        table.for_device(name)


READERS: dict[str, Callable[[Path], object]] = {
    "cluster": check_cluster,
    "simulation": load_deployment,
    "inventory": read_inventory,
    "keys": load_keys,
    "options": RenderOptions.read,
    "prediction": load_prediction,
    "accelerators": check_accelerators,
    "efficiencies": check_efficiencies,
    "calibration": Calibration.read,
    "model": geometry_from_file,
}
ACCELERATORS = yaml.safe_load(BUILT_IN.read_text())
EFFICIENCIES = yaml.safe_load(SHIPPED.read_text())
SOUND: dict[str, Any] = {
    **yaml.safe_load((Path(__file__).parent / "sound_files.yaml").read_text()),
    "keys": [{"name": "a", "digest": digest_of("x"), "classes": ["batch"], "weight": 2.0, "role": "look"}],
    "accelerators": {name: ACCELERATORS[name] for name in list(ACCELERATORS)[:2]},
    "efficiencies": {**EFFICIENCIES, "devices": dict(list(EFFICIENCIES["devices"].items())[:1])},
    "model": json.loads((ROOT / "models" / "demo" / "config.json").read_text()),
}
_ODD: list[Any] = [None, True, -1, 0, 3, 0.5, 1e300, 1e-320, float("inf"), float("nan"), 2**64 - 1, -(2**63)]
_ODD += ["", "a" * 300, "\u2028", "\U0001f600", "2026-01-01", "*a", "a.b"]
_ODD += [[], {}, [[]], [{}], {"a": {"b": []}}, {1: 2}, {None: 1}]
_bounded = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def refusal(kind: str, file: Path) -> str:
    try:
        READERS[kind](file)
    except PolyphaseError as error:
        return error.message.encode().decode()
    return ""


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or mapping, with each of its keys."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(pairs):
        yield content, key
        yield from places(value)


def test_the_good_ones_are_good(tmp_path: Path) -> None:
    for kind, content in SOUND.items():
        file = tmp_path / f"{kind}.yaml"
        file.write_text(yaml.safe_dump(content))
        assert refusal(kind, file) == "" or kind == "model"


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@_bounded
def test_one_value_is_odd(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = copy.deepcopy(SOUND[kind])
    for _ in range(data.draw(st.integers(1, 2))):
        found = list(places(content))
        if not found:
            break
        into, key = found[data.draw(st.integers(0, len(found) - 1))]
        odd = copy.deepcopy(data.draw(st.sampled_from(_ODD)))
        match data.draw(st.sampled_from(["replace", "add", "remove"])):
            case "replace":
                into[key] = odd
            case "add" if isinstance(into, dict):
                into[data.draw(st.sampled_from(["odd", 1, "", "id", "count", "accelerator", "x" * 200]))] = odd
            case "add":
                into.append(odd)
            case _:
                del into[key]
    file = tmp_path / "odd.yaml"
    file.write_text(json.dumps(content, default=str) if kind == "model" else yaml.safe_dump(content), encoding="utf-8")
    said = refusal(kind, file)
    assert not said or "odd.yaml" in said
    assert len(said) < 100_000


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@_bounded
def test_any_text(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    whole = (json.dumps(SOUND[kind]) if kind == "model" else yaml.safe_dump(SOUND[kind])).encode()
    first, last = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))
    between = data.draw(
        st.binary(max_size=3) | st.sampled_from([b"*a", b"!t ", b"&a ", b"<<: ", b"? ", b"\n", b"[" * 99])
    )
    file = tmp_path / "odd.yaml"
    file.write_bytes(whole[:first] + between + whole[last:])
    said = refusal(kind, file)
    assert not said or "odd.yaml" in said
