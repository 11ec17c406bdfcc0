"""The LoRA adapters that were loaded at run time."""

import sqlalchemy as sa
from alembic import op

revision = "adapters"
down_revision = "origins"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
