"""Made workloads by their words: a name, or lengths such as `prompt=1000,output=200`."""

from dataclasses import replace

from shared.errors import InvalidRequest
from shared.sim.arrivals import Tetri, synthetic, tetri
from shared.sim.workload import Workload

# Log-normal lengths with the means and variations of the public Azure traces of 2023 (all rows; CC-BY-4.0, Patel et
# al., Splitwise, ISCA 2024): prompt, output, and their coefficients of variation.
_LIKE = {"azure-conv": (1155.0, 211.0, 0.96, 0.77), "azure-code": (2048.0, 28.0, 0.96, 2.15)}
# The most that each may be: beyond, drawn lengths outgrow the integers that hold them.
_MOST = {"prompt": 1e7, "output": 1e7, "prompt_cv": 100.0, "output_cv": 100.0, "longest": 2e7}
CHOICES = f"{', '.join((*_LIKE, *Tetri))}, or lengths such as prompt=1000,output=200"


def is_made(words: str) -> bool:
    """Whether `made` is who knows what these words mean, if anybody."""
    return words in _LIKE or words in list(Tetri) or "=" in words


def made(words: str, count: int, seed: int, lengths: Workload | None = None) -> Workload:
    """`count` requests, all at time 0. lengths: token counts from which TetriInfer's workloads are drawn.

    Raises InvalidRequest that names what is wrong and the choices.
    """
    if words in _LIKE:
        prompt, output, prompt_cv, output_cv = _LIKE[words]
        like = synthetic(count, prompt, output, prompt_cv=prompt_cv, output_cv=output_cv, seed=seed)
        return replace(like, name=words)
    if words in list(Tetri):
        return tetri(words, count, seed, lengths)
    if "=" in words:
        return _of_lengths(words, count, seed)
    raise InvalidRequest(f"no made workload {words!r}; there are {CHOICES}")


def _of_lengths(words: str, count: int, seed: int) -> Workload:
    values: dict[str, float] = {}
    for item in words.split(","):
        key, _, value = item.partition("=")
        key = key.strip()
        if key not in _MOST:
            raise InvalidRequest(f"workload {words!r}: no key {key!r}; known: {', '.join(_MOST)}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"workload {words!r}: {key} must be a number, not {value!r}") from error
        if not values[key] <= _MOST[key]:
            raise InvalidRequest(f"workload {words!r}: {key} must be at most {_MOST[key]:g}, not {value}")
    missing = [key for key in ("prompt", "output") if key not in values]
    if missing:
        raise InvalidRequest(f"workload {words!r}: {missing[0]} is missing")
    return synthetic(
        count,
        values["prompt"],
        values["output"],
        prompt_cv=values.get("prompt_cv", 0.0),
        output_cv=values.get("output_cv", 0.0),
        longest_tokens=int(max(0.0, values["longest"])) if "longest" in values else None,
        seed=seed,
    )
