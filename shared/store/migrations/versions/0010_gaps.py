"""Gaps between the tokens of answers: the longest of each request, and how many requests met their class's target."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_WINDOWS = ("itl_attainment", "gap_p50_s", "gap_p90_s", "gap_p99_s")


def upgrade() -> None:
    op.add_column("requests", sa.Column("longest_gap_s", sa.Double()))
    for name in ("gaps", "gaps_over"):
        op.add_column("requests", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.create_index("requests_gap", "requests", ["longest_gap_s"])
    op.add_column("served", sa.Column("itl_met", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("served", sa.Column("itl_target_s", sa.Double(), nullable=False, server_default="0"))
    for name in _WINDOWS:
        op.add_column("slo_windows", sa.Column(name, sa.Double()))


def downgrade() -> None:
    for name in _WINDOWS:
        op.drop_column("slo_windows", name)
    for name in ("itl_met", "itl_target_s"):
        op.drop_column("served", name)
    op.drop_index("requests_gap", "requests")
    for name in ("longest_gap_s", "gaps", "gaps_over"):
        op.drop_column("requests", name)
