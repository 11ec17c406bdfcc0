"""Bodies of the planner's HTTP API, validated once and turned into its own types. Paths in a body are not opened."""

import json
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag, field_validator, model_validator

from shared.cost.kinds import EngineModels
from shared.cost.library import Library, bundled_geometry, bundled_names
from shared.domain.instance import Role
from shared.domain.job import Slo, tight_gaps
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.files.places import Places
from shared.files.yaml_file import Document, parse_document
from shared.plan.find import PlanGoals, PlanRequest
from shared.plan.inventory import Inventory, checked, located
from shared.plan.search import ROBUST
from shared.sim.traces import BLOCK_TOKENS, with_prefixes
from shared.sim.workload import Workload, made

MAX_REQUESTS = 50_000
MAX_TOKENS = 10_000_000  # of a request
MAX_BLOCKS = 10_000  # of a prompt
MAX_INVENTORY = 1 << 20  # characters
MAX_ADDED = 256  # instances that a what-if question may add: the links between all of them are looked at

Name = Annotated[str, Field(min_length=1, max_length=128)]
Factor = Annotated[float, Field(gt=0, le=1_000)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
HashId = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]  # what JSON holds exactly
Amount = Annotated[float, Field(ge=0, le=1e9)]


class _Edge(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _is_none(value: object) -> bool:
    return value is None


class RequestIn(_Edge):
    """A request of a workload; arrivals do not decrease.

    hash_ids: of the blocks of its prompt, in order; all requests have them, or none does.
    """

    arrival_s: Amount
    prompt_tokens: Tokens
    output_tokens: Tokens
    hash_ids: Annotated[tuple[HashId, ...], Field(max_length=MAX_BLOCKS)] | None = Field(None, exclude_if=_is_none)


class SloIn(_Edge):
    """The targets of all requests."""

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.1
    itl_s: Seconds | None = None  # the default of an SLO class

    @model_validator(mode="after")
    def _gaps_at_least_mean(self) -> Self:
        if self.itl_s is not None and (wrong := tight_gaps(self.itl_s, self.tpot_s)):
            raise ValueError(wrong)
        return self


def _kind_of(workload: object) -> str:
    return "requests" if isinstance(workload, list) else "words"


_Words = Annotated[str, Field(max_length=256), Tag("words")]
_Requests = Annotated[list[RequestIn], Field(min_length=1, max_length=MAX_REQUESTS), Tag("requests")]


class SearchIn(_Edge):
    """What to plan for: the options of `polyphase plan`. seconds None: as many as a search may take, 60 at most.

    inventory: the text of an inventory file, or its content. model: a bundled name. workload: a synthetic one, in the
    words of `polyphase plan --workload`, or a list of requests. requests: how many to make, or to use of that list.
    block_tokens: of a block that `hash_ids` name.
    """

    inventory: Annotated[str, Field(min_length=1, max_length=MAX_INVENTORY)] | dict[str, object]
    model: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$")]
    workload: Annotated[_Words | _Requests, Discriminator(_kind_of)] = "azure-conv"
    slo: SloIn = SloIn()
    rate: Amount = 0.0
    target: Annotated[float, Field(gt=0, lt=1)] = 0.9
    budget: Seconds | None = None
    cheapest: bool = False
    method: str = "best"
    compare: bool = True
    seconds: Seconds | None = None
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = 3000
    block_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = BLOCK_TOKENS
    prefix_cache: bool = True
    codec: str = "raw"
    engine: str = "emulated"
    one_node: bool = False
    max_model_len: Tokens | None = None
    chunk_size: Annotated[int, Field(ge=1, le=1 << 20)] = 2048
    quantised: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=4)] = {}
    robust: Annotated[float, Field(ge=0, lt=1)] = ROBUST
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 1

    def resolved(self, library: Library, search_s: float) -> PlanRequest:
        """As the planner takes it; no search takes longer than `search_s` seconds.

        Raises InvalidRequest that names the key.
        """
        options = self.model_dump(include=set(PlanGoals.__dataclass_fields__) - {"seconds"})
        goals = PlanGoals(**options, seconds=min(self.seconds or PlanGoals().seconds, search_s))
        goals.check()
        try:
            bundled_geometry(self.model)
        except NotFound as error:
            known = ", ".join(bundled_names())
            raise InvalidRequest(f"model: {self.model!r} is not bundled; there are {known}") from error
        inventory, name = _inventory(self.inventory, library)
        models = EngineModels(library, bundled_geometry(self.model))
        slo = Slo(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s, itl_s=self.slo.itl_s or 0.0)
        return PlanRequest.build(goals, name, inventory, self.model, models, self._workload(), slo)

    def _workload(self) -> Workload:
        if isinstance(self.workload, str):
            return _made(self.workload, self.requests, self.seed)
        rows = self.workload[: self.requests]
        found = Workload(
            f"workload of {len(rows)} requests",
            np.array([row.arrival_s for row in rows]),
            np.array([row.prompt_tokens for row in rows], dtype=np.int64),
            np.array([row.output_tokens for row in rows], dtype=np.int64),
        )
        if all(row.hash_ids is None for row in rows):
            return found
        for at, row in enumerate(rows):
            if row.hash_ids is None:
                raise InvalidRequest(f"workload.{at}.hash_ids: missing, and other requests have them")
            if len(row.hash_ids) > -(-row.prompt_tokens // self.block_tokens):
                many = f"{len(row.hash_ids)} blocks of {self.block_tokens} tokens (block_tokens)"
                raise InvalidRequest(f"workload.{at}.hash_ids: {many} are more than the prompt's {row.prompt_tokens}")
        return with_prefixes(found, tuple(row.hash_ids or () for row in rows), self.block_tokens)


def _made(words: str, count: int, seed: int) -> Workload:
    try:
        return made(words, count, seed)
    except InvalidRequest as error:
        where = "" if error.message.startswith("workload") else "workload: "
        raise InvalidRequest(f"{where}{error.message}") from error


def _inventory(given: str | dict[str, object], library: Library) -> tuple[Inventory, str]:
    """The inventory and its name."""
    where = "inventory"
    document = Document(given, Places(where)) if isinstance(given, dict) else parse_document(given, where)
    if len(json.dumps(document.content, default=str)) > MAX_INVENTORY:
        raise InvalidRequest(f"inventory: longer than {MAX_INVENTORY} characters")
    read = checked(document)
    if read.accelerators is not None:
        raise InvalidRequest("inventory: accelerators: the planner opens no files; `polyphase plan` does")
    try:
        return located(read, library.catalogue, document.places), read.name or where
    except PolyphaseError as error:
        raise InvalidRequest(error.message) from error


class Added(_Edge):
    """`count` more instances like an existing one; in its role, unless another is named."""

    like: Name
    count: Annotated[int, Field(ge=1, le=MAX_ADDED)] = 1
    role: Role | None = None


class WhatIf(_Edge):
    """Other instances, or another demand: its rate and its lengths are multiplied by these factors."""

    lost: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()
    added: Annotated[tuple[Added, ...], Field(max_length=64)] = ()
    rate_factor: Factor = 1.0
    prompt_factor: Factor = 1.0
    output_factor: Factor = 1.0

    @field_validator("added")
    @classmethod
    def _few_enough(cls, added: tuple[Added, ...]) -> tuple[Added, ...]:
        count = sum(one.count for one in added)
        if count > MAX_ADDED:
            raise ValueError(f"{count} instances in all; at most {MAX_ADDED}")
        return added


class ModeIn(_Edge):
    """Whether proposals are applied at once."""

    auto: StrictBool
