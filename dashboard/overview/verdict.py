"""The verdict in words, its problems, the chain that requests pass, and the instances that should be there."""

import streamlit as st

from dashboard import frame, look, units
from dashboard.console import Console
from dashboard.reads import Read
from dashboard.records import ClusterSummary
from shared.domain.instance import Role
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
