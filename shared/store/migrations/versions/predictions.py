"""What the estimate of a request's first placement predicted."""

import sqlalchemy as sa
from alembic import op

revision = "predictions"
down_revision = "moves"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("predicted_ttft_s", sa.Double()))
    op.add_column("requests", sa.Column("predicted_tpot_s", sa.Double()))
