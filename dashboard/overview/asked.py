"""What clients ask for, which roles would serve it best, and which classes of them wait or are refused."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.frame import NO_MONITOR
from dashboard.gateway_classes import ClassLoad
from dashboard.reads import Read
from dashboard.records import ClusterSummary, DemandSeen, ShiftSeen
from shared.domain.demand import AskedSecond, RolesWanted
from shared.domain.instance import InstanceState, Role

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
    table = frame(seen.seconds)
    for column, name, colour in ((left, "requests/s", look.DECODE), (right, "prompt tokens", look.PREFILL)):
        with column:
            st.caption(f"{name}, by second" if column is left else f"{name} of a request, mean by second")
            st.bar_chart(table, y=name, x="time", color=colour, height=_HEIGHT_PX, x_label="", y_label="")


def frame(seconds: Sequence[AskedSecond]) -> pd.DataFrame:
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
