"""The initial schema.

Revisions after it need ids other than 0001 to 0010: those were the revisions that it replaced (`shared.store.migrate`).
"""

import sqlalchemy as sa
from alembic import op

revision = "initial"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("event_id", sa.String(), nullable=False),
        sa.Column("time_s", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("instance_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("operation_id", sa.String(), server_default="", nullable=False),
        sa.Column("job_id", sa.String(), server_default="", nullable=False),
        sa.Column("subject", sa.String(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("events_instance", "events", ["instance_id", "time_s"])
    op.create_index("events_time", "events", ["time_s"])
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
        sa.Column("code", sa.String()),
        sa.Column("why", sa.Text()),
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
        "leases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.Column("length_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
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
        "plans",
        sa.Column("plan_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("submitted_s", sa.Double(), nullable=False),
        sa.Column("ended_s", sa.Double()),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("result", sa.Text()),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("plan_id"),
    )
    op.create_index("plans_submitted", "plans", ["submitted_s"])
    op.create_table(
        "policies",
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "proposals",
        sa.Column("proposal_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("made_s", sa.Double(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("proposal_id"),
    )
    op.create_index("proposals_made", "proposals", ["made_s"])
    op.create_table(
        "requests",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("scheduler_id", sa.String(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("caller", sa.String(), server_default="", nullable=False),
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
        sa.Column("longest_gap_s", sa.Double()),
        sa.Column("gaps", sa.Integer(), server_default="0", nullable=False),
        sa.Column("gaps_over", sa.Integer(), server_default="0", nullable=False),
        sa.Column("slo_met", sa.Boolean()),
        sa.Column("timeline", sa.Text()),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_index("requests_arrived", "requests", ["arrived_s"])
    op.create_index("requests_caller", "requests", ["caller", "arrived_s"])
    op.create_index("requests_decode", "requests", ["decode_instance", "arrived_s"])
    op.create_index("requests_gap", "requests", ["longest_gap_s"])
    op.create_index(
        "requests_open",
        "requests",
        ["updated_s"],
        sqlite_where=sa.text("final IS 0"),
        postgresql_where=sa.text("final IS false"),
    )
    op.create_index("requests_outcome", "requests", ["outcome", "arrived_s"])
    op.create_index("requests_phase", "requests", ["phase", "arrived_s"])
    op.create_index("requests_prefill", "requests", ["prefill_instance", "arrived_s"])
    op.create_index("requests_slo", "requests", ["slo", "arrived_s"])
    op.create_index("requests_tpot", "requests", ["tpot_s"])
    op.create_index("requests_ttft", "requests", ["ttft_s"])
    op.create_table(
        "served",
        sa.Column("step_s", sa.Integer(), nullable=False),
        sa.Column("time_s", sa.BigInteger(), nullable=False),
        sa.Column("slo", sa.String(), nullable=False),
        sa.Column("life", sa.String(), nullable=False),
        sa.Column("completed", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Integer(), nullable=False),
        sa.Column("refused", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("ttft_met", sa.Integer(), nullable=False),
        sa.Column("tpot_met", sa.Integer(), nullable=False),
        sa.Column("itl_met", sa.Integer(), server_default="0", nullable=False),
        sa.Column("met", sa.Integer(), nullable=False),
        sa.Column("ttft_target_s", sa.Double(), nullable=False),
        sa.Column("tpot_target_s", sa.Double(), nullable=False),
        sa.Column("itl_target_s", sa.Double(), server_default="0", nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("step_s", "time_s", "slo", "life"),
    )
    op.create_index("served_time", "served", ["time_s"])
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
        sa.Column("itl_attainment", sa.Double()),
        sa.Column("gap_p50_s", sa.Double()),
        sa.Column("gap_p90_s", sa.Double()),
        sa.Column("gap_p99_s", sa.Double()),
        sa.PrimaryKeyConstraint("slo", "window_s", "time_s"),
    )
    op.create_index("slo_windows_time", "slo_windows", ["time_s"])
    op.create_index("requests_longest", "requests", [sa.text("(updated_s - arrived_s)")])
