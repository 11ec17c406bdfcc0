"""The Overview page: the verdict with its problems, the stages that requests pass, the cluster over time, SLO
attainment by class, and the demand.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import streamlit as st
from msgspec import structs

from dashboard import charts, layout, markup, units
from dashboard.actions import confirm_pending, show_results
from dashboard.answers import (
    CLUSTER,
    DEMAND,
    GATEWAY_HEALTH,
    INSTANCE_HISTORY,
    INSTANCES,
    LENGTH_SOURCE,
    SCHEDULER_HEALTH,
    VERDICT,
    ClassLoad,
)
from dashboard.api import Read
from dashboard.charts import POINTS, Line, Panel
from dashboard.console import Console
from dashboard.layout import NO_MONITOR
from shared.domain.demand import AskedSecond, RolesWanted
from shared.domain.instance import Role
from shared.domain.slo import SloReport
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Verdict
from shared.palette import BAD, CAUTION, DECODE, GOOD, IDLE, PREFILL, TRANSFER
from shared.wire.api import NoticedShift
from shared.wire.api.monitor import ClusterSummary, Column, DemandAnswer, History

STAGES = {
    Stage.QUEUE: ("Queue", IDLE),
    Stage.PREFILL: ("Prefill", PREFILL),
    Stage.TRANSFER: ("Transfer", TRANSFER),
    Stage.DECODE_QUEUE: ("Decode queue", IDLE),
    Stage.DECODE: ("Decode", DECODE),
}
PROBLEMS_SHOWN = 8
_MISSED = {"missed": "true", "order": "slowest_ttft"}
# The requests that explain a problem, as an address of the Requests page.
PROBLEM_REQUESTS: dict[str, dict[str, str]] = {
    "ttft_missed": _MISSED,
    "tpot_missed": {"missed": "true", "order": "slowest_tpot"},
    "itl_missed": {"missed": "true", "order": "longest_gap"},
    "errors": {"phase": "failed", "order": "newest"},
    "queue_long": _MISSED,
    "transfers_slow": _MISSED,
}
SLOW_S = 5.0  # refresh period of the lower part, at least
FIGURE_S = 30.0  # refresh period of the figures, at most; otherwise a step of the history
ALL_CLASSES = "all classes"


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel over time. series: of `GET /history`: name, label, colour, and a dash unless it is solid. target: the
    name of the target that the panel shows.
    """

    title: str
    series: Sequence[tuple[str, ...]]
    target: str = ""
    share: bool = False
    stacked: bool = False


def _stages() -> list[tuple[str, ...]]:
    labels = {Stage.DECODE_QUEUE: ("d. queue", charts.DECODE_QUEUE_COLOUR)}
    names = {stage: labels.get(stage, (name.lower(), colour)) for stage, (name, colour) in STAGES.items()}
    return [(f"stage_{stage}_s", *label) for stage, label in names.items()]


def _percentiles(figure: str, colour: str, high: str = "p99") -> list[tuple[str, ...]]:
    return [(f"{figure}_p50_s", "p50", colour, "dot"), (f"{figure}_{high}_s", high, colour)]


PANELS = (
    PanelSpec("Requests/s", [("requests_per_s", "ended", DECODE)]),
    PanelSpec("Tokens/s", [("prompt_tokens_per_s", "prompt", PREFILL), ("output_tokens_per_s", "output", DECODE)]),
    PanelSpec("SLO attainment", [("attainment", "all targets", GOOD)], "attainment", share=True),
    PanelSpec(
        "Attainment by target",
        [
            ("ttft_attainment", "TTFT", PREFILL),
            ("tpot_attainment", "TPOT", DECODE),
            ("itl_attainment", "ITL", TRANSFER),
        ],
        "attainment",
        share=True,
    ),
    PanelSpec("TTFT (s)", _percentiles("ttft", PREFILL), "ttft_s"),
    PanelSpec("TPOT (s)", _percentiles("tpot", DECODE), "tpot_s"),
    PanelSpec("Longest gap (s)", _percentiles("gap", DECODE, "p90"), "itl_s"),
    PanelSpec(
        "Not served/s",
        [
            ("failed_per_s", "failed", BAD),
            ("refused_per_s", "refused", CAUTION),
            ("cancelled_per_s", "cancelled", IDLE, "dot"),
        ],
    ),
    PanelSpec("Time by stage (s)", _stages(), stacked=True),
    PanelSpec("Jobs", [("running", "running", DECODE), ("waiting", "waiting", CAUTION)]),
    PanelSpec("KV in use", [("kv_used_prefill", "prefill", PREFILL), ("kv_used_decode", "decode", DECODE)], share=True),
)
_PERCENTILES = ("p50", "p90", "p99")
MARKS_LEGEND = "✕ death · ◆ flip · ▲ other event; point at a symbol to read it"


def overview(console: Console) -> None:
    confirm_pending(console)
    refresh_s = console.settings.refresh_s
    st.fragment(_now, run_every=refresh_s)(console)
    minutes = layout.range_heading("Over time", console.api)
    every_s = max(refresh_s, min(FIGURE_S, minutes * 60.0 / POINTS))
    st.fragment(_history, run_every=every_s)(console, minutes)
    st.fragment(_instance_maps, run_every=every_s)(console, minutes)
    st.fragment(_slo_and_demand, run_every=max(SLOW_S, refresh_s))(console)


def _now(console: Console) -> None:
    api, now_s = console.api, time.time()
    futures = api.read(VERDICT), api.read(CLUSTER), api.read(SCHEDULER_HEALTH)
    gateway, predictor = api.read_optional(GATEWAY_HEALTH), api.read_optional(LENGTH_SOURCE)
    verdict, cluster, scheduler = futures[0].result(), futures[1].result(), futures[2].result()
    reads: list[Read[Any] | None] = [verdict, cluster, scheduler]
    reads += [layout.optional_result(gateway), layout.optional_result(predictor)]
    layout.header(console, cluster.value.model if cluster.value else "", reads)
    show_results(console, now_s)
    if verdict.value is None:
        st.html(markup.empty(NO_MONITOR))
        return
    _verdict(verdict, verdict.value, console, now_s)
    st.html(_chain(verdict.value, verdict.stale))
    st.html(_counts(verdict.value, cluster.value, verdict.stale))


def snapshot(read: Read[Verdict], verdict: Verdict, cluster: ClusterSummary | None, now_s: float) -> str:
    """The upper part of the page without its links."""
    problems = [markup.page(_problem(problem), stale=read.stale) for problem in verdict.problems[:PROBLEMS_SHOWN]]
    lower = _chain(verdict, read.stale), _counts(verdict, cluster, read.stale)
    return "".join([_banner(read, verdict, now_s), *problems, *lower])


def first_charts(last_hour: History, zone: str, goal: float) -> str:
    """The panels over the first time range."""
    minutes = charts.RANGES[layout.shortest_range(last_hour)]
    from_s = max(last_hour.from_s, last_hour.to_s - 60 * minutes)
    return history_charts(structs.replace(last_hour, from_s=from_s), zone, goal)


def _chain(verdict: Verdict, stale: bool) -> str:
    return markup.page(f'<div class="pp-chain">{"".join(map(_stage, verdict.chain))}</div>', stale=stale)


def _counts(verdict: Verdict, cluster: ClusterSummary | None, stale: bool) -> str:
    return markup.page(markup.tiles(*_count_tiles(verdict, cluster)), stale=stale)


def _banner(read: Read[Verdict], verdict: Verdict, now_s: float) -> str:
    """The headline."""
    colour = IDLE if read.stale else markup.LEVEL_COLOUR[verdict.level]
    about = f"{units.count(verdict.requests)} requests ended in the last {units.duration(verdict.window_s)}"
    words = f"<div><strong>{markup.text(verdict.headline)}</strong>{markup.soft(about)} {layout.age(read, now_s)}</div>"
    banner = f'<div class="pp-verdict" style="--c:{colour}" role="status">{markup.sign(verdict.level)}{words}</div>'
    return markup.page(banner, stale=read.stale)


def _verdict(read: Read[Verdict], verdict: Verdict, console: Console, now_s: float) -> None:
    """The headline, and each problem with links to what it concerns."""
    st.html(_banner(read, verdict, now_s))
    if not verdict.problems:
        return
    with st.container(key="problems"):
        for place, problem in enumerate(verdict.problems[:PROBLEMS_SHOWN]):
            with st.container(horizontal=True, vertical_alignment="center", key=f"problem-{place}", gap="small"):
                st.html(markup.page(_problem(problem), stale=read.stale), width="content")
                _problem_links(problem, console)
        if len(verdict.problems) > PROBLEMS_SHOWN:
            st.caption(f"and {len(verdict.problems) - PROBLEMS_SHOWN} more")


def _problem(problem: Problem) -> str:
    cause = f" {markup.soft(problem.cause)}" if problem.cause else ""
    words = f"<div>{markup.strong(problem.text)}{cause}</div>"
    return f'<div class="pp-problem">{markup.sign(problem.level)}{words}</div>'


def _problem_links(problem: Problem, console: Console) -> None:
    console.instance_links(problem.instances, limit=4)
    address = PROBLEM_REQUESTS.get(problem.what)
    if address is not None:
        console.link("requests", "requests", icon=":material/search:", **address)
    if problem.what == "policies_not_followed":
        console.link("policies", "policies")
    if problem.what == "predictor_fallback":
        console.link("predictor", "predictor")


def _stage(link: Link) -> str:
    """A stage's median and 99th percentile, its share of all time, and the requests in it now."""
    name, colour = STAGES[link.stage]
    problem = markup.sign(link.level) if link.level in (Level.DEGRADED, Level.DOWN) else ""
    times = "".join(
        f"<span>{markup.soft(percentile)} {markup.strong(units.duration(value))}</span>"
        for percentile, value in (("p50", link.p50_s), ("p99", link.p99_s))
    )
    of_time = units.NONE if link.share is None else f"{100 * link.share:.0f} % of time"
    head = f"<em><span>{markup.text(name)} {problem}</span>{markup.soft(f'{units.count(link.now)} now')}</em>"
    pair, bar = f'<div class="pp-pair">{times}</div>', markup.bar("", link.share, of_time, colour)
    return f'<div class="pp-link" style="--c:{colour}">{head}{pair}{bar}</div>'


def _count_tiles(verdict: Verdict, cluster: ClusterSummary | None) -> list[str]:
    tiles = [_ready_tile(role, verdict.counts.get(role, Count())) for role in Role]
    if cluster is not None:
        total = {name: units.count(value) for name, value in cluster.totals.items()}
        running, waiting = total.get("running", "0"), total.get("waiting", "0")
        queued = f"{total.get('queued_prefill_tokens', '0')} tokens"
        tiles.append(markup.tile("Jobs in flight", total.get("inflight", "0"), f"{running} running, {waiting} waiting"))
        tiles.append(markup.tile("Queued for prefill", queued, f"in {total.get('queued_prefill', '0')} jobs"))
    tiles.append(_target_tile(cluster, verdict.thresholds.attainment))
    return tiles


def _ready_tile(role: Role, count: Count) -> str:
    kinds = ("dead", "unresponsive", "missing", "draining", "starting")
    note = ", ".join(f"{getattr(count, kind)} {kind}" for kind in kinds if getattr(count, kind))
    gone = count.dead + count.unresponsive + count.missing
    colour = BAD if gone or (count.expected and not count.ready) else ""
    label = f"{role.value.capitalize()} instances ready"
    return markup.tile(label, f"{count.ready} of {count.expected}", note or "none is missing", colour)


def _target_tile(cluster: ClusterSummary | None, goal: float) -> str:
    targets = {
        (report.ttft_target_s, report.tpot_target_s, report.itl_target_s or 0.0)
        for report in (cluster.slo if cluster is not None else [])
    }
    known = sorted((ttft, tpot, itl) for ttft, tpot, itl in targets if ttft is not None and tpot is not None)
    if not known:
        return markup.tile("SLO goal", units.share(goal), "of requests; no request with targets yet")
    words = "; ".join(
        f"TTFT {units.duration(ttft)}, TPOT {units.duration(tpot)}" + (f", ITL {units.duration(itl)}" if itl else "")
        for ttft, tpot, itl in known[:2]
    )
    return markup.tile("SLO goal", units.share(goal), f"of requests: {words}{' …' if len(known) > 2 else ''}")


def _history(console: Console, minutes: int) -> None:
    """The panels over time, rebuilt when the history has changed."""
    read = layout.history_of(console.api, minutes).result()
    if read.value is None:
        st.html(markup.empty(NO_MONITOR if read.error else "No history yet."))
        return
    slo = ALL_CLASSES
    if len(read.value.classes) > 1:
        slo = layout.choice("Class", [ALL_CLASSES, *read.value.classes], ALL_CLASSES, "class")
    history, zone, goal = read.value.for_class(slo), layout.time_zone(), console.settings.slo_goal
    state = f"history {minutes} {slo} {history.to_s} {len(history.marks)} {zone} {goal}"
    with layout.stale_container("over-time", read):
        st.html(charts.cached_chart(state, partial(history_charts, history, zone, goal)))


def history_charts(history: History, zone: str, goal: float) -> str:
    targets = {**history.targets, "attainment": goal}
    panels = [
        Panel(
            spec.title,
            [Line(history.series.get(name, []), *style) for name, *style in spec.series],
            targets.get(spec.target),
            share=spec.share,
            stacked=spec.stacked,
        )
        for spec in PANELS
    ]
    grid = charts.panel_grid(history.time_s, (history.from_s, history.to_s), panels, zone, history.marks)
    return grid + (markup.page(markup.soft(MARKS_LEGEND)) if history.marks else "")


def _instance_maps(console: Console, minutes: int) -> None:
    """Heat maps of all instances; nothing where their history is unknown."""
    rows = console.api.read(INSTANCES).result()
    points = POINTS if len(rows.value or ()) <= 48 else POINTS // 2
    fresh_s = minutes * 60.0 / points
    read = console.api.read(INSTANCE_HISTORY, fresh_s=fresh_s, minutes=minutes, points=points).result()
    if read.value is None or not read.value.instances:
        return
    zone = layout.time_zone()
    state = f"maps {minutes} {read.value.to_s} {len(read.value.instances)} {zone}"
    with layout.stale_container("heat", read):
        st.html(charts.cached_chart(state, partial(charts.instance_maps, read.value, zone)))


def _slo_and_demand(console: Console) -> None:
    api, now_s = console.api, time.time()
    cluster, demand, classes = api.read(CLUSTER), api.read(DEMAND), api.classes()
    _slo(cluster.result(), console.settings.slo_goal)
    _classes(layout.optional_result(classes))
    _demand(demand.result(), cluster.result().value, now_s)


def _slo(cluster: Read[ClusterSummary], goal: float) -> None:
    """Attainment and percentiles of each class over each window."""
    st.subheader("SLO attainment", anchor=False)
    if cluster.value is None:
        st.html(markup.empty(NO_MONITOR))
        return
    if not any(report.requests for report in cluster.value.slo):
        st.html(markup.empty("No request has ended within these windows."))
        return
    heads = ["Class", "Window", "Requests", "Targets TTFT / TPOT / ITL", f"All met (goal {units.share(goal)})"]
    heads += ["TTFT met", "TPOT met", "ITL met", "TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99"]
    heads.append("Longest gap p50 / p90 / p99 / max")
    rows = [_slo_row(report, goal) for report in cluster.value.slo]
    st.html(markup.page(markup.table(heads, rows), stale=cluster.stale))


def _slo_row(report: SloReport, goal: float) -> list[str]:
    shares = (report.attainment, report.ttft_attainment, report.tpot_attainment, report.itl_attainment)
    percentiles = (
        (report.ttft_s, _PERCENTILES),
        (report.tpot_s, _PERCENTILES),
        (report.longest_gap_s, (*_PERCENTILES, "max")),
    )
    targets = (report.ttft_target_s, report.tpot_target_s, report.itl_target_s)
    return [
        markup.strong(report.slo),
        markup.text(units.duration(report.window_s)),
        markup.text(units.count(report.requests)),
        markup.text(" / ".join(map(units.duration, targets))),
        *(_attainment_bar(share, goal) for share in shares),
        *(" / ".join(markup.text(units.duration(values.get(name))) for name in names) for values, names in percentiles),
    ]


def _attainment_bar(share: float | None, goal: float) -> str:
    missed = share is not None and share < goal
    label = f"✕ {units.share(share)}" if missed else units.share(share)
    return markup.bar("", share, label, BAD if missed else GOOD)


def _classes(read: Read[list[ClassLoad]] | None) -> None:
    """Requests that the gateway delays or refuses; nothing where it does neither."""
    if read is None or not read.value:
        return
    heads = ["Class", "Waiting for heavier classes", "Delayed", "Refused (overload)"]
    rows = [
        [markup.strong(each.slo), *(markup.text(units.count(n)) for n in (each.waiting, each.delayed, each.refused))]
        for each in read.value
    ]
    st.html(markup.page(markup.soft("At the gateway, since its start"), markup.table(heads, rows), stale=read.stale))


def _demand(read: Read[DemandAnswer], cluster: ClusterSummary | None, now_s: float) -> None:
    """The demand profile, its last minutes, and the roles that would serve it best."""
    st.subheader("Demand", anchor=False)
    if read.value is None:
        st.html(markup.empty(NO_MONITOR))
        return
    demand = read.value
    if not any(each.requests for each in demand.seconds):
        st.html(markup.empty("No requests in the last minutes."))
        return
    tiles = [_profile_tile(demand), _shift_tile(demand.shifts, now_s), _roles_tile(demand.roles, cluster)]
    st.html(markup.page(markup.tiles(*tiles), stale=read.stale))
    st.html(demand_charts(demand.seconds, layout.time_zone()))


def demand_charts(seconds: Sequence[AskedSecond], zone: str) -> str:
    """Requests and the mean length of their prompts, by second."""
    requests: Column = [each.requests for each in seconds]
    prompts: Column = [each.prompt_tokens for each in seconds]
    panels = [
        Panel("Requests in each second", [Line(requests, "", DECODE)], bars=True),
        Panel("Mean prompt tokens of the requests of each second", [Line(prompts, "", PREFILL)], bars=True),
    ]
    time_s = [each.second for each in seconds]
    return charts.panel_grid(time_s, (time_s[0], time_s[-1] + 1.0), panels, zone)


def _profile_tile(answer: DemandAnswer) -> str:
    demand = answer.demand
    if demand is None:
        return markup.tile("Profile", units.NONE, "too few requests for a profile")
    prompt, output = units.count(demand.prompt_tokens), units.count(demand.output_tokens)
    lengths = f"{prompt} prompt tokens, {output} expected output tokens, unchanged for {units.duration(demand.age_s)}"
    return markup.tile("Profile", f"{demand.rate:.3g} requests/s", lengths)


def _shift_tile(shifts: Sequence[NoticedShift], now_s: float) -> str:
    if not shifts:
        return markup.tile("Last shift", "none", "in the last minutes")
    shift = shifts[-1]
    values = f"{shift.what}: {units.count(shift.before)} → {units.count(shift.after)}"
    note = f"{units.ago(shift.at_s, now_s)}, detected after {units.duration(shift.noticed_s)}"
    return markup.tile("Last shift", values, note)


def _roles_tile(wanted: RolesWanted | None, cluster: ClusterSummary | None) -> str:
    now = [cluster.ready(role) for role in Role] if cluster is not None else []
    name, value = "Ready prefill : decode", f"{now[0]} : {now[1]}" if now else units.NONE
    if wanted is None:
        return markup.tile(name, value, "the best numbers are not known")
    best = [wanted.prefill, wanted.decode]
    if best == now:
        return markup.tile(name, value, f"no other numbers are clearly better; SLO cost {wanted.harm:.2g}")
    note = f"{best[0]} : {best[1]} would be better: SLO cost {wanted.harm_then:.2g} instead of {wanted.harm:.2g}"
    return markup.tile(name, value, note, CAUTION)
