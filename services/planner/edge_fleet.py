"""What comes in over HTTP about the running cluster."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from shared.domain.instance import Role

Name = Annotated[str, Field(min_length=1, max_length=128)]
Factor = Annotated[float, Field(gt=0, le=1_000)]
MOST_ADDED = 256  # instances that a question may add: the links between all of them are looked at


class _Edge(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True)


class Added(_Edge):
    """So many more instances like one that is there; in its role, unless another is named."""

    like: Name
    count: Annotated[int, Field(ge=1, le=MOST_ADDED)] = 1
    role: Role | None = None


class WhatIf(_Edge):
    """Other instances, or another demand: its rate and lengths so many times as much."""

    lost: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()
    added: Annotated[tuple[Added, ...], Field(max_length=64)] = ()
    rate_factor: Factor = 1.0
    prompt_factor: Factor = 1.0
    output_factor: Factor = 1.0

    @field_validator("added")
    @classmethod
    def _few_enough(cls, added: tuple[Added, ...]) -> tuple[Added, ...]:
        count = sum(one.count for one in added)
        if count > MOST_ADDED:
            raise ValueError(f"{count} instances in all; at most {MOST_ADDED}")
        return added


class ModeIn(_Edge):
    """Whether proposals are applied by themselves."""

    auto: StrictBool
