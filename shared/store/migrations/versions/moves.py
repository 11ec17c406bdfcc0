"""The request of a move, and the instance to which it is to go."""

import sqlalchemy as sa
from alembic import op

revision = "moves"
down_revision = "adapters"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("flips", sa.Column("job_id", sa.String(), server_default="", nullable=False))
    op.add_column("flips", sa.Column("to_instance", sa.String(), server_default="", nullable=False))
