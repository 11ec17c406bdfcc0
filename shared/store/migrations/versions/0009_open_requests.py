"""Open requests have an index of their own: a start of the scheduler finds them without reading the table."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "requests_open",
        "requests",
        ["updated_s"],
        sqlite_where=sa.text("final IS 0"),
        postgresql_where=sa.text("final IS false"),
    )


def downgrade() -> None:
    op.drop_index("requests_open", "requests")
