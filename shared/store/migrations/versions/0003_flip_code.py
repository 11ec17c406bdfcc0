"""The code of an operation's error: who asks again gets the same one."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("flips", sa.Column("code", sa.String()))


def downgrade() -> None:
    op.drop_column("flips", "code")
