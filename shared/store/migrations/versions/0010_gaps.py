"""Gaps between the tokens of answers: the longest of each request, and how many requests met their class's target."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = {
    "requests": (
        lambda: sa.Column("longest_gap_s", sa.Double()),
        lambda: sa.Column("gaps", sa.Integer(), nullable=False, server_default="0"),
        lambda: sa.Column("gaps_over", sa.Integer(), nullable=False, server_default="0"),
    ),
    "served": (
        lambda: sa.Column("itl_met", sa.Integer(), nullable=False, server_default="0"),
        lambda: sa.Column("itl_target_s", sa.Double(), nullable=False, server_default="0"),
    ),
    "slo_windows": tuple(
        lambda name=name: sa.Column(name, sa.Double())
        for name in ("itl_attainment", "gap_p50_s", "gap_p90_s", "gap_p99_s")
    ),
}


def upgrade() -> None:
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.add_column(table, column())
    op.create_index("requests_gap", "requests", ["longest_gap_s"])


def downgrade() -> None:
    op.drop_index("requests_gap", "requests")
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.drop_column(table, column().name)
