"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "flips",
        sa.Column("operation_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("from_role", sa.String(), nullable=False),
        sa.Column("to_role", sa.String(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("started_s", sa.Double(), nullable=False),
        sa.Column("drain_s", sa.Double()),
        sa.Column("flip_s", sa.Double()),
        sa.Column("total_s", sa.Double()),
        sa.Column("result", sa.String(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("operation_id"),
    )
    op.create_index("flips_started", "flips", ["started_s"])
    op.create_table(
        "instances",
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("registered_s", sa.Double(), nullable=False),
        sa.Column("updated_s", sa.Double(), nullable=False),
        sa.Column("info", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("instance_id"),
    )
    op.create_table(
        "loads",
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("time_s", sa.Double(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("queued_prefill", sa.Integer(), nullable=False),
        sa.Column("queued_prefill_tokens", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("waiting", sa.Integer(), nullable=False),
        sa.Column("decoding", sa.Integer(), nullable=False),
        sa.Column("heavy_decodes", sa.Integer(), nullable=False),
        sa.Column("context_tokens", sa.BigInteger(), nullable=False),
        sa.Column("free_blocks", sa.Integer(), nullable=False),
        sa.Column("staged_bytes", sa.BigInteger(), nullable=False),
        sa.Column("inflight", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", "time_s"),
    )
    op.create_index("loads_time", "loads", ["time_s"])
    op.create_table(
        "requests",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("scheduler_id", sa.String(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("arrived_s", sa.Double(), nullable=False),
        sa.Column("updated_s", sa.Double(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("prefill_instance", sa.String(), nullable=False),
        sa.Column("decode_instance", sa.String(), nullable=False),
        sa.Column("split", sa.Integer(), nullable=False),
        sa.Column("slo", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("ttft_s", sa.Double()),
        sa.Column("tpot_s", sa.Double()),
        sa.Column("slo_met", sa.Boolean()),
        sa.Column("timeline", sa.Text()),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_index("requests_arrived", "requests", ["arrived_s"])
    op.create_index("requests_phase", "requests", ["phase", "arrived_s"])
    op.create_table(
        "slo_windows",
        sa.Column("slo", sa.String(), nullable=False),
        sa.Column("window_s", sa.Double(), nullable=False),
        sa.Column("time_s", sa.Double(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("ttft_attainment", sa.Double()),
        sa.Column("tpot_attainment", sa.Double()),
        sa.Column("attainment", sa.Double()),
        sa.Column("ttft_p50_s", sa.Double()),
        sa.Column("ttft_p99_s", sa.Double()),
        sa.Column("tpot_p50_s", sa.Double()),
        sa.Column("tpot_p99_s", sa.Double()),
        sa.PrimaryKeyConstraint("slo", "window_s", "time_s"),
    )
    op.create_index("slo_windows_time", "slo_windows", ["time_s"])


def downgrade() -> None:
    op.drop_table("slo_windows")
    op.drop_table("requests")
    op.drop_table("loads")
    op.drop_table("instances")
    op.drop_table("flips")
