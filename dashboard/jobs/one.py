"""One request in full: its story in sentences, its waterfall, its figures; of one under way as far as it is known."""

import time

import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import Console
from dashboard.jobs.story import story
from dashboard.jobs.waterfall import waterfall
from dashboard.reads import Read
from shared.timeline import RequestTimeline
from shared.wire.messages import JobReport


def one(console: Console, job_id: str) -> None:
    """The page of one; it refreshes itself until the request has ended."""
    read = console.api.timeline(job_id).result()
    ended = read.value is not None and bool(read.value.ended_s)
    st.fragment(_live, run_every=None if ended else console.settings.refresh_s)(console, job_id, ended)


def _live(console: Console, job_id: str, ended: bool) -> None:
    api = console.api
    asked = api.request(job_id), api.timeline(job_id)
    row, timeline = asked[0].result(), asked[1].result()
    if not ended and timeline.value is not None and timeline.value.ended_s:
        st.rerun()  # it will not change any more: no refresh is needed
    unknown = row.value is None and timeline.value is None
    known = [one for one in (row, timeline) if one.value is not None or unknown]
    services = [frame.of_scheduler(console, *known)]
    frame.header(console, "Requests", services, every_s=0.0 if not ended else frame.NEVER_S)
    console.link("requests", "All requests", icon=":material/arrow_back:")
    if timeline.value is None:
        st.html(look.page(f"<h2>{look.text(job_id)}</h2>", _row(row), _row_figures(row)))
        st.html(look.empty(timeline.error))
        return
    draw(timeline.value, row, console, "waterfall")


def draw(timeline: RequestTimeline, row: Read[JobReport], console: Console, key: str) -> None:
    """Headline, figures, waterfall, sentences, and links to where it was."""
    told = story(timeline)
    st.html(look.page(f'<div class="pp-story">{look.strong(told.headline)}</div>', _row(row), summary(timeline)))
    st.plotly_chart(waterfall(timeline), key=key, config=figures.SMALL)
    st.html(look.page(told.steps))
    places = dict.fromkeys(span.instance_id for span in timeline.spans if span.instance_id)
    if places:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(look.page(look.soft("It was on")), width="content")
            console.instance_links(places)


def summary(timeline: RequestTimeline) -> str:
    """The figures of the request, in a line."""
    return look.facts(
        [
            ("request", timeline.job_id),
            ("outcome", timeline.outcome or "under way"),
            ("prompt", f"{timeline.prompt_tokens} tokens"),
            ("output", f"{timeline.output_tokens} tokens"),
            ("TTFT", units.duration(timeline.ttft_s)),
            ("TPOT", units.duration(timeline.tpot_s)),
            ("longest gap", units.duration(timeline.longest_gap_s if timeline.gaps else None)),
            ("JCT", units.duration(timeline.jct_s)),
        ]
    )


def _row(read: Read[JobReport]) -> str:
    row = read.value
    if row is None:
        return ""
    met = {True: look.badge("✓ SLO met", look.GOOD), False: look.badge("✕ SLO missed", look.BAD), None: ""}
    split = f"split at {row.split} of {row.prompt_tokens} prompt tokens" if row.split else ""
    arrived = f"arrived {units.ago(row.arrived_s, time.time())}"
    words = " · ".join(filter(None, (f"class {row.slo}", f"phase {row.phase.value}", arrived, split)))
    return f"<div>{met[row.slo_met]} {look.soft(words)}</div>"


def _row_figures(read: Read[JobReport]) -> str:
    row = read.value
    if row is None:
        return ""
    return look.facts(
        [
            ("prefill", row.prefill_instance or units.NONE),
            ("decode", row.decode_instance or units.NONE),
            ("prompt", f"{row.prompt_tokens} tokens"),
            ("output", f"{row.output_tokens} tokens"),
        ]
    )
