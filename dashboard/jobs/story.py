"""A request's story as HTML: a sentence a step, its figures on demand."""

from dataclasses import dataclass

from dashboard import look, units
from shared.explain import Sentence, explain
from shared.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class Story:
    """What happened in a sentence, and step by step as HTML."""

    headline: str
    steps: str


def story(timeline: RequestTimeline) -> Story:
    """Of one request."""
    told = explain(timeline)
    return Story(told.headline, "".join(map(_step, told.steps)))


def _step(step: Sentence) -> str:
    colour = f' style="--c:{look.SPAN_COLOUR[step.span]}"' if step.span is not None else ""
    at = "" if step.at_s is None else f"{'+' if step.at_s >= 0 else '−'}{units.duration(abs(step.at_s))}"
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in step.figures.items())
    more = f"<details><summary>figures</summary><code>{look.text(figures)}</code></details>" if figures else ""
    moment = f'<span class="pp-at">{look.text(at)}</span>'
    return f'<div class="pp-sentence"{colour}>{moment}{look.text(step.text)}{more}</div>'


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"
