"""What stands on every page: the name, whether each service answers, a clock that tells when nothing is refreshed."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard import look, units
from dashboard.console import Console
from dashboard.login.gate import leave_button
from dashboard.reads import Read

NO_MONITOR = "Nothing to show while the cluster monitor does not answer."
LATE = 3  # refreshes that may be missing
NEVER_S = float("inf")  # what has ended needs no refresh


@dataclass(frozen=True, slots=True)
class Service:
    """One of those that a page reads. meaning: of its absence."""

    name: str
    url: str
    meaning: str
    reads: Sequence[Read[Any] | None]

    @property
    def error(self) -> str:
        """Why something of it is missing; empty when nothing is."""
        return next((read.error for read in self.reads if read is not None and read.error), "")

    @property
    def known_s(self) -> float | None:
        """From when the oldest thing is that is shown of it; None when nothing is."""
        return min((read.read_s for read in self.reads if read is not None and read.value is not None), default=None)


def of_monitor(console: Console, *reads: Read[Any]) -> Service:
    """The monitor, as far as these reads tell."""
    meaning = "Instances, the verdict, policies and actions wait until it answers. Serving goes on without it."
    return Service("cluster monitor", console.settings.monitor_url, meaning, reads)


def of_scheduler(console: Console, *reads: Read[Any]) -> Service:
    """The scheduler, as far as these reads tell."""
    return Service("global scheduler", console.settings.scheduler_url, "Requests wait until it answers.", reads)


def of_gateway(console: Console, read: Read[Any] | None) -> Service:
    """The gateway."""
    return Service("gateway", console.settings.gateway_url, "It takes no requests.", [read])


def of_predictor(console: Console, read: Read[Any] | None) -> Service:
    """The predictor."""
    meaning = "Requests are served without a predicted output length."
    return Service("predictor", console.settings.predictor_url, meaning, [read])


def header(console: Console, title: str, services: Sequence[Service], every_s: float = 0.0) -> None:
    """The line on top, and a notice for each service that does not answer as it should."""
    now_s = time.time()
    dots = "".join(_dot(service) for service in services if service.url)
    dots += clock(now_s, every_s or console.settings.refresh_s)
    parts = f"<b>Polyphase</b>{look.soft(title)}<span class='pp-services'>{dots}</span>"
    with st.container(horizontal=True, vertical_alignment="center", key="header"):
        st.html(look.page(f'<div class="pp-head">{parts}</div>'))
        leave_button(console.account)
    for service in services:
        if service.url and service.error:
            outage(service, now_s)


def clock(now_s: float, every_s: float) -> str:
    """When this was drawn, counted on by the browser itself; a band over everything once that is too long ago."""
    if every_s == NEVER_S:
        return look.soft("this will not change any more")
    late = f"--late:{LATE * every_s:g}s"
    said = "This page no longer refreshes. What it shows is old, by seconds: "
    return (
        f'<span class="pp-clock" data-at="{now_s:.2f}" style="{late}">'
        f'<span class="pp-age">refreshed </span>'
        f'<span class="pp-late" role="alert">✕ {look.text(said)}<span class="pp-age-figure"></span></span></span>'
    )


def outage(service: Service, now_s: float) -> None:
    """One service does not answer as it should, and from when what is still shown of it is."""
    said = service.error.replace("`", "'")  # it ends no block of code
    known_s = service.known_s
    known = "" if known_s is None else f" In grey: what it said {units.ago(known_s, now_s)}."
    st.error(
        f"**The {service.name} at `{service.url}` does not answer as it should.** {service.meaning}{known}"
        f"\n\n```text\n{said}\n```",
        icon=":material/cloud_off:",
    )


def waited(future: "Future[Read[Any]] | None") -> Read[Any] | None:
    """What an optional service says."""
    return future.result() if future is not None else None


def aged(read: Read[Any], now_s: float) -> str:
    """How old what is shown is, where it is old."""
    return look.soft(f"as of {units.ago(read.read_s, now_s)}") if read.stale else ""


def _dot(service: Service) -> str:
    error = service.error
    said = f"{service.name} ✕" if error else service.name  # not by the colour alone
    return look.dot(said, look.BAD if error else look.GOOD, error or "answers")
