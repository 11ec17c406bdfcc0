"""Tables. Times are unix seconds, durations seconds."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData()

requests = Table(
    "requests",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("scheduler_id", String, nullable=False),
    Column("gateway_id", String, nullable=False),
    Column("caller", String, nullable=False, server_default=""),  # the name of its API key
    Column("phase", String, nullable=False),
    Column("final", Boolean, nullable=False),
    Column("arrived_s", Double, nullable=False),
    Column("updated_s", Double, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("prefill_instance", String, nullable=False),
    Column("decode_instance", String, nullable=False),
    Column("split", Integer, nullable=False),
    Column("slo", String, nullable=False),
    Column("outcome", String, nullable=False),
    Column("ttft_s", Double),
    Column("tpot_s", Double),
    Column("longest_gap_s", Double),  # between two deliveries of its tokens
    Column("gaps", Integer, nullable=False, server_default="0"),
    Column("gaps_over", Integer, nullable=False, server_default="0"),  # of those, longer than the class's `itl_s`
    Column("slo_met", Boolean),
    Column("predicted_ttft_s", Double),  # by the estimate of its first placement
    Column("predicted_tpot_s", Double),
    Column("timeline", Text),  # JSON of shared.timeline.RequestTimeline
    Index("requests_arrived", "arrived_s"),
    Index("requests_phase", "phase", "arrived_s"),
    Index("requests_caller", "caller", "arrived_s"),
    Index("requests_slo", "slo", "arrived_s"),
    Index("requests_outcome", "outcome", "arrived_s"),
    Index("requests_prefill", "prefill_instance", "arrived_s"),
    Index("requests_decode", "decode_instance", "arrived_s"),
    Index("requests_ttft", "ttft_s"),
    Index("requests_tpot", "tpot_s"),
    Index("requests_gap", "longest_gap_s"),
    Index("requests_longest", text("(updated_s - arrived_s)")),
    Index("requests_open", "updated_s", sqlite_where=text("final IS 0"), postgresql_where=text("final IS false")),
)

instances = Table(
    "instances",
    metadata,
    Column("instance_id", String, primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("role", String, nullable=False),
    Column("state", String, nullable=False),  # InstanceState, or "left" or "forgotten"
    Column("registered_s", Double, nullable=False),
    Column("updated_s", Double, nullable=False),
    Column("info", Text, nullable=False),  # JSON of shared.domain.instance.InstanceInfo
)

loads = Table(
    "loads",
    metadata,
    Column("instance_id", String, nullable=False),
    Column("time_s", Double, nullable=False),
    Column("role", String, nullable=False),
    Column("state", String, nullable=False),
    Column("queued_prefill", Integer, nullable=False),
    Column("queued_prefill_tokens", Integer, nullable=False),
    Column("running", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
    Column("decoding", Integer, nullable=False),
    Column("heavy_decodes", Integer, nullable=False),
    Column("context_tokens", BigInteger, nullable=False),
    Column("free_blocks", Integer, nullable=False),
    Column("staged_bytes", BigInteger, nullable=False),
    Column("inflight", Integer, nullable=False),
    PrimaryKeyConstraint("instance_id", "time_s"),
    Index("loads_time", "time_s"),
)

# Loads of all instances in each step of 10 s, a minute and ten minutes, by the monitor's process that sampled them.
load_steps = Table(
    "load_steps",
    metadata,
    Column("step_s", Integer, nullable=False),
    Column("time_s", BigInteger, nullable=False),  # where the step begins
    Column("life", String, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("totals", Text, nullable=False),  # JSON of Totals in cluster_monitor.load_history
    Column("instances", Text, nullable=False),  # JSON: [[id, role, state], …]
    Column("figures", LargeBinary, nullable=False),  # float32 of their means: FIGURES in cluster_monitor.load_history
    PrimaryKeyConstraint("step_s", "time_s", "life"),
    Index("load_steps_time", "time_s"),
)

# Requests that ended in each step of 10 s and a minute, by class and by the monitor's process that counted them.
served = Table(
    "served",
    metadata,
    Column("step_s", Integer, nullable=False),
    Column("time_s", BigInteger, nullable=False),  # where the step begins
    Column("slo", String, nullable=False),
    Column("life", String, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("cancelled", Integer, nullable=False),
    Column("refused", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("ttft_met", Integer, nullable=False),  # of completed and failed ones
    Column("tpot_met", Integer, nullable=False),
    Column("itl_met", Integer, nullable=False, server_default="0"),
    Column("met", Integer, nullable=False),  # all three
    Column("ttft_target_s", Double, nullable=False),  # of the last one
    Column("tpot_target_s", Double, nullable=False),
    Column("itl_target_s", Double, nullable=False, server_default="0"),
    Column("content", Text, nullable=False),  # JSON of Served in cluster_monitor.request_stats
    PrimaryKeyConstraint("step_s", "time_s", "slo", "life"),
    Index("served_time", "time_s"),
)

slo_windows = Table(
    "slo_windows",
    metadata,
    Column("slo", String, nullable=False),
    Column("window_s", Double, nullable=False),
    Column("time_s", Double, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("ttft_attainment", Double),
    Column("tpot_attainment", Double),
    Column("attainment", Double),
    Column("ttft_p50_s", Double),
    Column("ttft_p99_s", Double),
    Column("tpot_p50_s", Double),
    Column("tpot_p99_s", Double),
    Column("itl_attainment", Double),
    Column("gap_p50_s", Double),  # of the requests' longest gaps
    Column("gap_p90_s", Double),
    Column("gap_p99_s", Double),
    PrimaryKeyConstraint("slo", "window_s", "time_s"),
    Index("slo_windows_time", "time_s"),
)

# The audit of operations on instances and requests: flips, drains, resumes and moves.
flips = Table(
    "flips",
    metadata,
    Column("operation_id", String, primary_key=True),
    Column("kind", String, nullable=False),  # shared.wire.api.OperationKind
    Column("instance_id", String, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("from_role", String, nullable=False),
    Column("to_role", String, nullable=False),
    Column("who", String, nullable=False),
    Column("started_s", Double, nullable=False),
    Column("drain_s", Double),
    Column("flip_s", Double),
    Column("total_s", Double),
    Column("result", String, nullable=False),  # shared.wire.api.OperationResult
    Column("error", Text, nullable=False),
    Column("code", String),  # of the error
    Column("why", Text),  # the reasons of a policy or of the planner; null for operators
    Column("origin", String, nullable=False, server_default="operator"),  # shared.wire.api.Origin
    Column("job_id", String, nullable=False, server_default=""),  # of a move
    Column("to_instance", String, nullable=False, server_default=""),  # of a move; empty for any
    Index("flips_started", "started_s"),
)

# The log of the cluster.
events = Table(
    "events",
    metadata,
    Column("event_id", String, primary_key=True),
    Column("time_s", Double, nullable=False),
    Column("kind", String, nullable=False),  # shared.wire.api.EventKind
    Column("instance_id", String, nullable=False),
    Column("role", String, nullable=False),
    Column("text", Text, nullable=False),
    Column("operation_id", String, nullable=False, server_default=""),
    Column("job_id", String, nullable=False, server_default=""),
    Column("subject", String, nullable=False, server_default=""),  # what else it concerns: a plan, a gateway
    Column("origin", String, nullable=False, server_default=""),  # of the operation
    Index("events_time", "time_s"),
    Index("events_instance", "instance_id", "time_s"),
)

# The policies in force; one row for the cluster. Changes are among the events.
policies = Table(
    "policies",
    metadata,
    Column("cluster", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("changed_s", Double, nullable=False),
    Column("who", String, nullable=False),
    Column("content", Text, nullable=False),  # JSON of services.cluster_monitor.policy_book.Kept
)

# The LoRA adapters that were loaded at run time; one row for the cluster. Changes are among the events.
adapters = Table(
    "adapters",
    metadata,
    Column("cluster", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("changed_s", Double, nullable=False),
    Column("who", String, nullable=False),
    Column("content", Text, nullable=False),  # JSON of shared.domain.adapters.AdapterSet
)

# Searches for plans.
plans = Table(
    "plans",
    metadata,
    Column("plan_id", String, primary_key=True),
    Column("state", String, nullable=False),  # services.planner.searches.SearchState
    Column("who", String, nullable=False),
    Column("submitted_s", Double, nullable=False),
    Column("ended_s", Double),
    Column("request", Text, nullable=False),  # JSON of services.planner.edge.SearchIn
    Column("progress", Text, nullable=False),  # JSON: how far it was when the row was written
    Column("result", Text),  # JSON, once there is a plan
    Column("error", Text, nullable=False),
    Index("plans_submitted", "submitted_s"),
)

# Proposals of the planner for the running cluster, and their states.
proposals = Table(
    "proposals",
    metadata,
    Column("proposal_id", String, primary_key=True),
    Column("state", String, nullable=False),  # services.planner.proposals.ProposalState
    Column("made_s", Double, nullable=False),
    Column("content", Text, nullable=False),  # JSON of services.planner.proposals.Proposal
    Index("proposals_made", "made_s"),
)

# Leases: the acting one of several processes (shared.store.lease).
leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("url", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    Column("length_s", Double, nullable=False),
)

# The column of the age of a table's rows.
AGE: dict[str, str] = {
    "requests": "arrived_s",
    "loads": "time_s",
    "load_steps": "time_s",
    "served": "time_s",
    "slo_windows": "time_s",
    "flips": "started_s",
    "events": "time_s",
    "plans": "submitted_s",
    "proposals": "made_s",
}
