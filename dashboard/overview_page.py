"""The Overview page: the verdict with its problems, the chain of services that requests pass, SLO attainment by
class, and the demand.
"""

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import frame, look, units
from dashboard.console import Console
from dashboard.frame import NO_MONITOR, ask, results
from dashboard.operations import Session
from dashboard.overview_graphs import graphs, heat
from dashboard.reads import Read
from dashboard.records import POINTS, RANGES, ClassLoad, ClusterSummary, DemandSeen, ShiftSeen
from shared.domain.demand import AskedSecond, RolesWanted
from shared.domain.instance import InstanceState, Role
from shared.domain.slo import SloReport
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Verdict

STAGES = {
    Stage.QUEUE: ("Queue", look.IDLE),
    Stage.PREFILL: ("Prefill", look.PREFILL),
    Stage.TRANSFER: ("Transfer", look.TRANSFER),
    Stage.DECODE_QUEUE: ("Decode queue", look.IDLE),
    Stage.DECODE: ("Decode", look.DECODE),
}
SHOWN = 8  # problems
_MISSED = {"missed": "true", "order": "slowest_ttft"}
# Which requests tell more of a problem.
REQUESTS: dict[str, dict[str, str]] = {
    "ttft_missed": _MISSED,
    "tpot_missed": {"missed": "true", "order": "slowest_tpot"},
    "itl_missed": {"missed": "true", "order": "longest_gap"},
    "errors": {"phase": "failed", "order": "newest"},
    "queue_long": _MISSED,
    "transfers_slow": _MISSED,
}


def verdict(read: Read[Verdict], console: Console, now_s: float) -> None:
    """The headline, and each problem with links to what it concerns."""
    found = read.value
    assert found is not None
    colour = look.IDLE if read.stale else look.LEVEL_COLOUR[found.level]
    about = f"{units.count(found.requests)} requests ended in the last {units.duration(found.window_s)}"
    said = f"<div><strong>{look.text(found.headline)}</strong>{look.soft(about)} {frame.aged(read, now_s)}</div>"
    banner = f'<div class="pp-verdict" style="--c:{colour}" role="status">{look.sign(found.level)}{said}</div>'
    st.html(look.page(banner, stale=read.stale))
    if not found.problems:
        return
    with st.container(key="problems"):
        for place, problem in enumerate(found.problems[:SHOWN]):
            with st.container(horizontal=True, vertical_alignment="center", key=f"problem-{place}", gap="small"):
                st.html(look.page(_problem(problem), stale=read.stale), width="content")
                _links(problem, console)
        if len(found.problems) > SHOWN:
            st.caption(f"and {len(found.problems) - SHOWN} more")


def chain(read: Read[Verdict]) -> None:
    """The five stages: how long, which share of all time, how many are there now."""
    assert read.value is not None
    links = "".join(_link(link) for link in read.value.chain)
    st.html(look.page(f'<div class="pp-chain">{links}</div>', stale=read.stale))


def counts(read: Read[Verdict], cluster: Read[ClusterSummary]) -> None:
    """Instances against what should be there, and the load of all."""
    assert read.value is not None
    tiles = [_count(role, read.value.counts.get(role, Count())) for role in Role]
    if cluster.value is not None:
        total = {name: units.count(value) for name, value in cluster.value.totals.items()}
        running, waiting = total.get("running", "0"), total.get("waiting", "0")
        queued = f"{total.get('queued_prefill_tokens', '0')} tokens"
        tiles.append(look.tile("Jobs in flight", total.get("inflight", "0"), f"{running} running, {waiting} waiting"))
        tiles.append(look.tile("Queued for prefill", queued, f"of {total.get('queued_prefill', '0')} jobs"))
    tiles.append(_targets(cluster, read.value))
    st.html(look.page(look.tiles(*tiles), stale=read.stale))


def _problem(problem: Problem) -> str:
    cause = f" {look.soft(problem.cause)}" if problem.cause else ""
    return f'<div class="pp-problem">{look.sign(problem.level)}<div>{look.strong(problem.text)}{cause}</div></div>'


def _links(problem: Problem, console: Console) -> None:
    console.instance_links(problem.instances, most=4)
    address = REQUESTS.get(problem.what)
    if address is not None:
        console.link("requests", "requests", icon=":material/search:", **address)
    if problem.what == "policies_not_followed":
        console.link("policies", "policies")
    if problem.what == "predictor_fallback":
        console.link("predictor", "predictor")


def _link(link: Link) -> str:
    name, colour = STAGES[link.stage]
    trouble = look.sign(link.level) if link.level in (Level.DEGRADED, Level.DOWN) else ""
    now = f"{units.count(link.now)} now"
    times = (
        f"<span>{look.soft('p50')} {look.strong(units.duration(link.p50_s))}</span>"
        f"<span>{look.soft('p99')} {look.strong(units.duration(link.p99_s))}</span>"
    )
    share = look.bar("", link.share, "–" if link.share is None else f"{100 * link.share:.0f} % of time", colour)
    head = f"<em><span>{look.text(name)} {trouble}</span>{look.soft(now)}</em>"
    return f'<div class="pp-link" style="--c:{colour}">{head}<div class="pp-pair">{times}</div>{share}</div>'


def _count(role: Role, count: Count) -> str:
    kinds = ("dead", "unresponsive", "missing", "draining", "starting")
    note = ", ".join(f"{getattr(count, kind)} {kind}" for kind in kinds if getattr(count, kind))
    gone = count.dead + count.unresponsive + count.missing
    colour = look.BAD if gone or (count.expected and not count.ready) else ""
    value = f"{count.ready} of {count.expected}"
    return look.tile(f"{role.value.capitalize()} instances ready", value, note or "all that should be there", colour)


def _targets(cluster: Read[ClusterSummary], found: Verdict) -> str:
    goal = units.share(found.thresholds.attainment)
    targets = {
        (one.ttft_target_s, one.tpot_target_s, one.itl_target_s or 0.0)
        for one in (cluster.value.slo if cluster.value else [])
    }
    known = sorted((ttft, tpot, itl) for ttft, tpot, itl in targets if ttft is not None and tpot is not None)
    if not known:
        return look.tile("Targets", goal, "of requests; none has named any yet")
    said = "; ".join(
        f"TTFT {units.duration(ttft)}, TPOT {units.duration(tpot)}" + (f", ITL {units.duration(itl)}" if itl else "")
        for ttft, tpot, itl in known[:2]
    )
    return look.tile("Targets", goal, f"of requests: {said}{' …' if len(known) > 2 else ''}")


_PERCENTILES = ("p50", "p90", "p99")


def slo(cluster: Read[ClusterSummary], slo_goal: float) -> None:
    """Attainment of each class over each window, with percentiles."""
    st.subheader("SLO attainment", anchor=False)
    if cluster.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not any(report.requests for report in cluster.value.slo):
        st.html(look.empty("No request has ended within the windows."))
        return
    every = f"All met (goal {units.share(slo_goal)})"
    heads = ["Class", "Window", "Requests", "Targets TTFT / TPOT / ITL", every, "TTFT met", "TPOT met", "ITL met"]
    heads += ["TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "Longest gap p50 / p90 / p99 / worst"]
    rows = [_slo_row(report, slo_goal) for report in cluster.value.slo]
    st.html(look.page(look.table(heads, rows), stale=cluster.stale))


def _attained(value: float | None, goal: float) -> tuple[str, str]:
    """Attainment in words, and the colour of what they mean."""
    if value is None or value >= goal:
        return units.share(value), look.GOOD
    return f"✕ {units.share(value)}", look.BAD


def _slo_row(report: SloReport, goal: float) -> list[str]:
    shares = (report.attainment, report.ttft_attainment, report.tpot_attainment, report.itl_attainment)
    met = [look.bar("", value, *_attained(value, goal)) for value in shares]
    percentiles = [
        " / ".join(look.text(units.duration(figures.get(p))) for p in which)
        for figures, which in (
            (report.ttft_s, _PERCENTILES),
            (report.tpot_s, _PERCENTILES),
            (report.longest_gap_s, (*_PERCENTILES, "max")),
        )
    ]
    targets = " / ".join(
        units.duration(target) for target in (report.ttft_target_s, report.tpot_target_s, report.itl_target_s)
    )
    about = (units.duration(report.window_s), units.count(report.requests), targets)
    return [look.strong(report.slo), *(look.text(value) for value in about), *met, *percentiles]


_HEIGHT_PX = 150


def classes(read: Read[list[ClassLoad]] | None) -> None:
    """What the gateway holds back or refuses of each class; nothing where it does neither."""
    if read is None or not read.value:
        return
    heads = ["Class", "Waiting for heavier ones", "Had to wait", "Refused for load"]
    rows = [
        [look.strong(one.slo), *(look.text(units.count(n)) for n in (one.waiting, one.delayed, one.refused))]
        for one in read.value
    ]
    st.html(look.page(look.soft("At the gateway, since it started"), look.table(heads, rows), stale=read.stale))


def demand(read: Read[DemandSeen], cluster: Read[ClusterSummary], now_s: float) -> None:
    """The profile, its last minutes, and the roles it would need beside those that there are."""
    st.subheader("What clients ask for", anchor=False)
    if read.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    seen = read.value
    if not any(one.requests for one in seen.seconds):
        st.html(look.empty("Nothing was asked for in the last minutes."))
        return
    st.html(look.page(look.tiles(*_tiles(seen, cluster.value, now_s)), stale=read.stale))
    left, right = st.columns(2, gap="medium")
    table = demand_frame(seen.seconds)
    for column, name, colour in ((left, "requests/s", look.DECODE), (right, "prompt tokens", look.PREFILL)):
        with column:
            st.caption(f"{name}, by second" if column is left else f"{name} of a request, mean by second")
            st.bar_chart(table, y=name, x="time", color=colour, height=_HEIGHT_PX, x_label="", y_label="")


def demand_frame(seconds: Sequence[AskedSecond]) -> pd.DataFrame:
    """One line a second."""
    return pd.DataFrame(
        {
            "time": pd.to_datetime([one.second for one in seconds], unit="s", utc=True),
            "requests/s": [one.requests for one in seconds],
            "prompt tokens": [one.prompt_tokens for one in seconds],
        }
    )


def _tiles(seen: DemandSeen, cluster: ClusterSummary | None, now_s: float) -> list[str]:
    asked = seen.demand
    rate, lengths = "–", "too few requests for a profile"
    if asked is not None:
        rate = f"{asked.rate:.3g} requests/s"
        prompt, output = units.count(asked.prompt_tokens), units.count(asked.output_tokens)
        lengths = f"{prompt} prompt tokens, {output} expected, for {units.duration(asked.age_s)}"
    return [
        look.tile("Profile", rate, lengths),
        look.tile("Last shift", *_shift(seen.shifts[-1] if seen.shifts else None, now_s)),
        _roles_tile(seen.roles, cluster),
    ]


def _shift(shift: ShiftSeen | None, now_s: float) -> tuple[str, str]:
    if shift is None:
        return "none", "in the last minutes"
    said = f"{shift.what}: {units.count(shift.before)} → {units.count(shift.after)}"
    return said, f"{units.ago(shift.at_s, now_s)}, noticed after {units.duration(shift.noticed_s)}"


def _roles_tile(wanted: RolesWanted | None, cluster: ClusterSummary | None) -> str:
    now = [cluster.count(role, InstanceState.READY) for role in Role] if cluster is not None else []
    in_force = f"{now[0]} : {now[1]}" if now else "–"
    name = "Prefill : decode in force"
    if wanted is None:
        return look.tile(name, in_force, "which would be best is not known")
    best = [wanted.prefill, wanted.decode]
    if best == now:
        return look.tile(name, in_force, f"none is better by enough; harm {wanted.harm:.2g}")
    said = f"{best[0]} : {best[1]} would be better: harm {wanted.harm_then:.2g} instead of {wanted.harm:.2g}"
    return look.tile(name, in_force, said, look.CAUTION)


SLOW_S = 5.0  # what is not looked at every second
ALWAYS_S = 30.0  # a figure is drawn anew once a step of its history, and at least so often


def overview(console: Console) -> None:
    """One run of the page."""
    session = Session()
    ask(session, console)
    st.fragment(_now, run_every=console.settings.refresh_s)(console, session)
    minutes = _range()
    every_s = max(console.settings.refresh_s, min(ALWAYS_S, minutes * 60.0 / POINTS))
    st.fragment(graphs, run_every=every_s)(console, minutes)
    st.fragment(heat, run_every=every_s)(console, minutes)
    st.fragment(_asked, run_every=max(SLOW_S, console.settings.refresh_s))(console)


def _now(console: Console, session: Session) -> None:
    api, now_s = console.api, time.time()
    asked_verdict, asked_cluster, asked_scheduler = api.verdict(), api.cluster(), api.scheduler_health()
    gateway, predictor = api.gateway_health(), api.predictor()
    judged, cluster, scheduler = asked_verdict.result(), asked_cluster.result(), asked_scheduler.result()
    services = [
        frame.of_monitor(console, judged, cluster),
        frame.of_scheduler(console, scheduler),
        frame.of_gateway(console, frame.waited(gateway)),
        frame.of_predictor(console, frame.waited(predictor)),
    ]
    frame.header(console, cluster.value.model if cluster.value else "", services)
    results(session, console, now_s)
    if judged.value is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    verdict(judged, console, now_s)
    chain(judged)
    counts(judged, cluster)


def _range() -> int:
    with st.container(horizontal=True, vertical_alignment="bottom", key="range-line"):
        st.subheader("Over time", anchor=False, width="content")
        chosen = st.segmented_control(
            "Range", list(RANGES), default="1 h", required=True, key="range", label_visibility="collapsed"
        )
    return RANGES[chosen or "1 h"]


def _asked(console: Console) -> None:
    api, now_s = console.api, time.time()
    cluster, asked, held = api.cluster(), api.demand(), api.classes()
    slo(cluster.result(), console.settings.slo_goal)
    classes(frame.waited(held))
    demand(asked.result(), cluster.result(), now_s)
