"""What was served and what instances did, in steps; whose a request is, and what an event concerns."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_SEARCHED = {
    "caller": ["caller", "arrived_s"],
    "slo": ["slo", "arrived_s"],
    "outcome": ["outcome", "arrived_s"],
    "prefill": ["prefill_instance", "arrived_s"],
    "decode": ["decode_instance", "arrived_s"],
    "ttft": ["ttft_s"],
    "tpot": ["tpot_s"],
}
_CONCERNS = ("operation_id", "job_id", "subject")


def upgrade() -> None:
    op.add_column("requests", sa.Column("caller", sa.String(), nullable=False, server_default=""))
    for name, columns in _SEARCHED.items():
        op.create_index(f"requests_{name}", "requests", columns)
    op.create_index("requests_longest", "requests", [sa.text("(updated_s - arrived_s)")])
    for name in _CONCERNS:
        op.add_column("events", sa.Column(name, sa.String(), nullable=False, server_default=""))
    op.create_index("events_instance", "events", ["instance_id", "time_s"])
    op.create_table(
        "load_steps",
        sa.Column("step_s", sa.Integer(), nullable=False),
        sa.Column("time_s", sa.BigInteger(), nullable=False),
        sa.Column("life", sa.String(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("totals", sa.Text(), nullable=False),
        sa.Column("instances", sa.Text(), nullable=False),
        sa.Column("figures", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("step_s", "time_s", "life"),
    )
    op.create_index("load_steps_time", "load_steps", ["time_s"])
    counts = ("completed", "failed", "cancelled", "refused")
    op.create_table(
        "served",
        sa.Column("step_s", sa.Integer(), nullable=False),
        sa.Column("time_s", sa.BigInteger(), nullable=False),
        sa.Column("slo", sa.String(), nullable=False),
        sa.Column("life", sa.String(), nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in counts),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in ("ttft_met", "tpot_met", "met")),
        sa.Column("ttft_target_s", sa.Double(), nullable=False),
        sa.Column("tpot_target_s", sa.Double(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("step_s", "time_s", "slo", "life"),
    )
    op.create_index("served_time", "served", ["time_s"])


def downgrade() -> None:
    op.drop_table("served")
    op.drop_table("load_steps")
    op.drop_index("events_instance", "events")
    for name in reversed(_CONCERNS):
        op.drop_column("events", name)
    op.drop_index("requests_longest", "requests")
    for name in _SEARCHED:
        op.drop_index(f"requests_{name}", "requests")
    op.drop_column("requests", "caller")
