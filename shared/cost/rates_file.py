"""The file of a calibration: workers report its rates, and the simulator uses its step times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.cost.library import Library
from shared.cost.step import Speed
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import InstanceInfo
from shared.domain.rates import Rates, StepSource
from shared.errors import InvalidRequest, NotFound
from shared.files.yaml_file import read_yaml
from shared.model.precision import stored_in

_EMULATED = "emulated:"  # how an emulated instance's fingerprint names its model
_HEAD = (
    "# Written by `polyphase calibrate live`. Times in seconds, lengths in tokens; errors are of steps that nothing\n"
    "# was fitted to. Workers report the rates of their kind when this file is their `rates_file`.\n"
)


class Kind(msgspec.Struct, frozen=True):
    """What instances of equal speed have in common. `model`: its name, or its folder's. `precision`: of its weights
    where they are quantised (`stored_in`), without the digest of a checkpoint.
    """

    engine: str
    accelerator: str
    model: str
    dtype: str
    tensor_parallel: int
    threads: int
    pipeline_parallel: int = 1
    precision: str = ""

    @classmethod
    def from_info(cls, info: InstanceInfo, threads: int) -> "Kind":
        """The kind of an instance; `threads` is the worker's setting."""
        name = Path(geometry_name(info)).name
        engine, degrees = info.compatibility.engine, (info.tensor_parallel, info.pipeline_parallel)
        precision = stored_in(info.precision) or info.precision
        return cls(engine, info.accelerator, name, info.dtype, degrees[0], threads, degrees[1], precision)

    def __str__(self) -> str:
        parts = f"tensor_parallel {self.tensor_parallel}, threads {self.threads}"
        if self.pipeline_parallel > 1:
            parts += f", pipeline_parallel {self.pipeline_parallel}"
        weights = f" with {self.precision} weights" if self.precision else ""
        return f"{self.engine} on {self.accelerator}, {self.model}, {self.dtype}{weights}, {parts}"


def geometry_name(info: InstanceInfo) -> str:
    """The name under which the library finds the geometry of an instance's model."""
    fingerprint = info.compatibility.fingerprint
    return fingerprint.removeprefix(_EMULATED) if fingerprint.startswith(_EMULATED) else info.model


class CalibratedKind(msgspec.Struct, frozen=True):
    """One kind of instance.

    A step takes (scale × the step model + chunk_s × prefill chunks) × slowdown[busy neighbours on its host]. The step
    model is the catalogue's accelerator with compute and bandwidth times these factors; step_s and sequence_s are what
    a step and each of its sequences cost besides. saturation_tokens: the least chunk that reaches 90 % of the best
    prefill throughput. bias_percent: predicted total over measured total − 1.
    """

    kind: Kind
    geometry: str  # a bundled model, or the path of a config.json or its folder
    instances: tuple[str, ...]
    samples: int
    mape_percent: float
    naive_mape_percent: float
    bias_percent: float
    compute_factor: float
    bandwidth_factor: float
    step_s: float
    sequence_s: float
    scale: float
    chunk_s: float
    slowdown: tuple[float, ...]
    saturation_tokens: int
    rates: Rates

    def applied_to(self, known: Rates) -> Rates:
        """The rates of an instance of this kind; `known` has its price, weight and coding costs."""
        step = self.rates.step
        step = step and msgspec.structs.replace(step, source=StepSource.FIT)
        return msgspec.structs.replace(known, step=step, link=self.rates.link)

    def step_times(self, library: Library) -> ScaledSteps:
        """Step times of an instance that has its host to itself."""
        kind = self.kind
        degrees = kind.tensor_parallel, kind.pipeline_parallel
        model = library.step_model(kind.accelerator, self.geometry, *degrees, stored_in(kind.precision) or kind.dtype)
        speed = Speed(self.compute_factor, self.bandwidth_factor, self.step_s, self.sequence_s)
        return ScaledSteps(model.at_speed(speed), self.scale, self.chunk_s)


class ControlPlane(msgspec.Struct, frozen=True):
    """What the services add, in seconds.

    gateway_s: from the sending of a request to its placement; hop_s: from a decision to the instance; token_s: from an
    engine's token to the client. link_latency_s, link_bytes_s: of KV transfers; the bandwidth is 0 where it was too
    high, or transfers were too few, to measure it.
    """

    gateway_s: float = 0.0
    hop_s: float = 0.0
    token_s: float = 0.0
    link_latency_s: float = 0.0
    link_bytes_s: float = 0.0


class Calibration(msgspec.Struct, frozen=True):
    date: str
    cluster: str  # a description of what was calibrated
    control: ControlPlane
    kinds: tuple[CalibratedKind, ...]

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Raises InvalidRequest that names the file and what is wrong."""
        try:
            return msgspec.convert(read_yaml(path), cls)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{path}: {error}") from error

    def to_yaml(self) -> str:
        plain = rounded(msgspec.to_builtins(self), 5)
        body = yaml.safe_dump(plain, sort_keys=False, width=118, default_flow_style=None, allow_unicode=True)
        return f"{_HEAD}{body}"

    def for_kind(self, kind: Kind) -> CalibratedKind:
        """The calibration of that kind. Raises NotFound that names the calibrated kinds."""
        for one in self.kinds:
            if one.kind == kind:
                return one
        raise NotFound(f"not calibrated: {kind}; calibrated: {'; '.join(str(one.kind) for one in self.kinds)}")


def rounded(value: Any, digits: int) -> Any:
    """Plain values for a file: numbers with that many significant digits, without keys whose value is None."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
