"""Bodies of HTTP requests as msgspec structs: FastAPI has pydantic call the parser that `body_of` returns."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from pydantic import PlainValidator

from shared.domain.numbers import infinite_in

Parsed = TypeVar("Parsed")


def body_of(struct: type[Parsed], check: Callable[[Parsed], Iterator[str]] | None = None) -> PlainValidator:
    """Parses JSON data as a struct. check: yields what is wrong beside types and constraints."""

    def parse(data: Any) -> Parsed:
        if where := infinite_in(data):
            raise ValueError(f"{where} must be a finite number")
        try:
            parsed = msgspec.convert(data, struct)
        except msgspec.ValidationError as error:
            raise ValueError(_with_field(str(error))) from None
        if check is not None and (fault := next(check(parsed), None)):
            raise ValueError(fault)
        return parsed

    return PlainValidator(parse)


def _with_field(message: str) -> str:
    """msgspec's message, with the field at its head: `Expected … - at `$.who`` becomes `who: Expected …`."""
    fault, at, path = message.partition(" - at `$")
    return f"{path.removesuffix('`').removeprefix('.')}: {fault}" if at else message
