"""No number from outside is infinite or NaN: models of settings, files and bodies, and structs of the wire."""

import importlib
import math
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.inspect import FloatType, StructType, multi_type_info
from pydantic import BaseModel, ValidationError

import dashboard
import gateway
import predictor
import services
import shared
from services.cluster_monitor.routes import PolicyIn
from services.launcher.cluster_file import load_cluster
from shared.errors import InvalidRequest
from shared.runtime.keys import digest_of, load_keys


def _models() -> list[type[BaseModel]]:
    for package in (gateway, services, shared, predictor, dashboard):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            source = Path(found.module_finder.path) / f"{found.name.rpartition('.')[2]}.py"  # type: ignore[union-attr]
            if source.exists() and "pydantic" in source.read_text():
                importlib.import_module(found.name)

    def below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    ours = {"gateway", "services", "shared", "predictor", "dashboard"}
    return sorted({each for each in below(BaseModel) if each.__module__.partition(".")[0] in ours}, key=str)


MODELS = _models()


def test_all_of_them_are_found() -> None:
    names = {model.__name__ for model in MODELS}
    wanted = {"SloClass", "GatewaySettings", "WorkerSettings", "MonitorSettings", "PolicyIn", "Cluster", "PredictBody"}
    assert wanted <= names
    assert len(names) > 40


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__qualname__)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_no_field_takes_it(model: type[BaseModel], number: float) -> None:
    assert model.model_config.get("allow_inf_nan") is False
    floats = [name for name, field in model.model_fields.items() if "float" in repr(field.annotation)]
    if not floats:
        return
    with pytest.raises(ValidationError) as caught:
        model.model_validate({model.model_fields[name].alias or name: number for name in floats})
    refused = {error["loc"][0] for error in caught.value.errors()}
    assert {model.model_fields[name].alias or name for name in floats} <= refused


def _floats(kind: Any) -> Iterator[FloatType]:
    """Of a field; those of structs within it are of the structs' own."""
    if isinstance(kind, FloatType):
        yield kind
    elif not isinstance(kind, StructType):
        for field in getattr(kind, "__struct_fields__", ()):
            value = getattr(kind, field)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, msgspec.inspect.Type):
                    yield from _floats(inner)


@pytest.mark.parametrize("module", ["wire.messages", "wire.envelope", "domain.job"])
def test_no_struct_of_the_wire_takes_it(module: str) -> None:
    whole = importlib.import_module(f"shared.{module}")
    kinds = [
        each
        for each in vars(whole).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == whole.__name__
    ]
    loose = []
    for kind, info in zip(kinds, multi_type_info(kinds), strict=True):
        assert isinstance(info, StructType)
        loose += [
            f"{kind.__name__}.{field.name}"
            for field in info.fields
            if any(found.ge is None or found.le is None for found in _floats(field.type))
        ]
    assert set(loose) <= {"Envelope.timeout_s"}  # the server refuses such a call by an error of its own


@pytest.mark.parametrize("field", ["requests_per_s", "weight"])
@pytest.mark.parametrize("number", [".inf", ".nan"])
def test_no_key_has_it(tmp_path: Path, field: str, number: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: a, digest: {digest_of('x')}, {field}: {number}}}\n")
    with pytest.raises(InvalidRequest, match=f"{field} must be a finite number"):
        load_keys(file)


def test_no_cluster_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ninstances:\n  - {id: a, role: mixed, engine_args: {swap: [1, .inf]}}\n")
    with pytest.raises(InvalidRequest, match=r"yaml:3: instances\.a\.engine_args\.swap\.1: must be a finite number"):
        load_cluster(file)


def test_no_parameter_of_a_policy_has_it() -> None:
    with pytest.raises(ValidationError, match=r"deep\.x must be a finite number"):
        PolicyIn(name="adaptive", parameters={"deep": {"x": math.nan}})
