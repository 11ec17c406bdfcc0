"""What callers send, checked strictly."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from predictor.query import Query
from predictor.reality import Answer

MAX_OBSERVATIONS = 10_000
MAX_TOKENS = 2**31 - 2
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class PredictBody(BaseModel):
    """Either `prompt`, or the last `prompt_token_ids` of the served model with the whole `prompt_tokens`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    prompt: str | None = None
    prompt_token_ids: list[TokenCount] | None = Field(default=None, max_length=1 << 20)
    prompt_tokens: TokenCount | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    timeout_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        if self.prompt is not None:
            _require_unicode(self.prompt)
        ids = self.prompt_token_ids or []
        if self.prompt_tokens is not None and self.prompt_tokens < len(ids):
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, but {len(ids)} token ids came")
        return self

    def to_query(self, default_timeout_ms: float) -> Query:
        """The same, as the service wants it."""
        ids = self.prompt_token_ids
        return Query(
            timeout_s=(self.timeout_ms or default_timeout_ms) / 1000,
            text=self.prompt,
            token_ids=tuple(ids or ()),
            prompt_tokens=len(ids) if self.prompt_tokens is None and ids is not None else self.prompt_tokens,
            max_tokens=self.max_tokens,
        )


class Observation(BaseModel):
    """One finished answer; see `predictor.reality.Answer`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    prompt_tokens: TokenCount
    output_tokens: TokenCount
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    model: Annotated[str, Field(max_length=64)] = ""
    classified: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = -1
    expected_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def to_answer(self) -> Answer:
        """The same, as the service wants it."""
        return Answer(**self.model_dump())


class UseBody(BaseModel):
    """Who is to answer: see `PredictorSettings.use`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    use: Literal["auto", "classifier", "observed"]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise ValueError("prompt is not valid Unicode") from error
