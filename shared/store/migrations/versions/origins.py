"""The origin of each operation: an operator, a policy or a plan.

Rows of earlier versions get the origin that their reasons and actors show: operators gave no reasons, and policies
named themselves `role_flip:NAME`.
"""

import sqlalchemy as sa
from alembic import op

revision = "origins"
down_revision = "initial"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("flips", sa.Column("origin", sa.String(), server_default="operator", nullable=False))
    op.add_column("events", sa.Column("origin", sa.String(), server_default="", nullable=False))
    op.execute(
        "UPDATE flips SET origin = CASE WHEN who LIKE 'role_flip:%' THEN 'policy' ELSE 'plan' END WHERE why <> ''"
    )
    op.execute(
        "UPDATE events SET origin = COALESCE((SELECT flips.origin FROM flips "
        "WHERE flips.operation_id = events.operation_id), '') WHERE operation_id <> ''"
    )
