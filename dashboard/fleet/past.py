"""One instance over time: its role and state, KV, jobs, tokens that wait."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard import figures, look
from dashboard.history import InstanceColumns, InstanceHistory
from shared import palette
from shared.domain.instance import InstanceState, Role

COLUMNS = 3


def past(found: InstanceHistory, columns: InstanceColumns, zone: str) -> go.Figure:
    """Six panels."""
    height = 2 * figures.PANEL_PX + figures.GAP_PX
    drawn = make_subplots(rows=2, cols=COLUMNS, vertical_spacing=figures.GAP_PX / height, horizontal_spacing=0.045)
    x = figures.local(found.time_s, zone)
    panels = [
        ("KV in use", [(columns.kv_used, "", look.BAD, "solid")]),
        (
            "Jobs",
            [(columns.running, "running", look.DECODE, "solid"), (columns.waiting, "waiting", look.CAUTION, "solid")],
        ),
        ("Prompt tokens that wait", [(columns.queued_prefill_tokens, "tokens", look.PREFILL, "solid")]),
        ("Jobs in flight", [(columns.inflight, "jobs", "#8a63c9", "solid")]),
        ("KV that waits to be fetched", [(columns.staged_bytes, "bytes", look.TRANSFER, "solid")]),
    ]
    titles = []
    for place, (title, lines) in enumerate(panels):
        for values, said, colour, dash in lines:
            drawn.add_trace(figures.line(x, values, said, colour, dash), row=place // 3 + 1, col=place % 3 + 1)
        titles.append(figures.keyed(title, [(said, colour, dash) for _, said, colour, dash in lines if said]))
    drawn.add_trace(_role_and_state(found, columns, zone), row=2, col=3)
    titles.append("<b>Role</b>  " + _role_key())
    figures.arrange(drawn, 2)
    drawn.update_xaxes(range=figures.local([found.from_s, found.to_s], zone))
    drawn.update_yaxes(range=[0, 1.04], tickformat=".0%", row=1, col=1)
    drawn.update_yaxes(showticklabels=False, row=2, col=3)
    figures.name_panels(drawn, titles)
    return drawn


def _role_and_state(found: InstanceHistory, columns: InstanceColumns, zone: str) -> go.Heatmap:
    number = {Role.PREFILL.value: 0.0, Role.DECODE.value: 1.0}
    states = columns.state or [None] * len(columns.role)
    values = [
        None if role is None else -1.0 if state == InstanceState.DEAD.value else number.get(role, -1.0)
        for role, state in zip(columns.role, states, strict=True)
    ]
    said = [f"{role or 'unknown'}, {state or 'unknown'}" for role, state in zip(columns.role, states, strict=True)]
    return go.Heatmap(
        x=figures.local(found.time_s, zone),
        y=[""],
        z=[values],
        text=[said],
        colorscale=palette.ROLES,
        zmin=-1.0,
        zmax=1.0,
        showscale=False,
        hovertemplate="%{text}<extra></extra>",
    )


def _role_key() -> str:
    keys = (("■ prefill", look.PREFILL), ("■ decode", look.DECODE), ("■ gone", look.IDLE))
    return " ".join(f'<span style="color:{colour}">{said}</span>' for said, colour in keys)
