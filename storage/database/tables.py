"""The tables. Keys are natural: fingerprints of values, UUIDs of events.

JSON columns hold only what no query filters by. Documents of `trials.wire` are stored as its canonical text.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    FromClause,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from trials.wire import WHOLE

RUNNING, FINISHED, ABANDONED = "running", "finished", "abandoned"


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time. SQLite has no time zones and stores it in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class Whole(TypeDecorator[int]):
    """A 64-bit integer. Raise TypeError for another type of value, which a damaged SQLite file may hold."""

    impl = BigInteger
    cache_ok = True

    @property
    def python_type(self) -> type[int]:
        return int

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:  # noqa: ARG002
        if value is not None and value not in WHOLE:
            raise ValueError(f"{value} has more than 64 bits")
        return value

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:  # noqa: ARG002
        if value is not None and type(value) is not int:
            raise TypeError(f"{value!r} is no whole number")
        return value


class Finite(TypeDecorator[float]):
    """A finite number. SQLite itself would store an infinity as it is and a NaN as NULL."""

    impl = Double
    cache_ok = True

    @property
    def python_type(self) -> type[float]:
        return float

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:  # noqa: ARG002
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
        return value


METADATA = MetaData(
    # Migrations can only change constraints by name, and each database would choose names of its own.
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_required = partial(Column, nullable=False)
_VERSIONS = ("python", "torch", "deepspeed", "transformers")
"""Columns of `Software`."""

HARDWARE = Table(
    "autotune_hardware",
    METADATA,
    Column("fingerprint", Text, primary_key=True),
    _required("accelerator", Text),
    _required("device_name", Text),
    _required("devices", Whole),
    _required("device_memory_bytes", Whole),
    Column("compute_capability", Text),
    Column("driver", Text),
    _required("cpu_name", Text),
    _required("cpu_cores", Whole),
    _required("ram_bytes", Whole),
    _required("nodes", Whole),
    Column("link", Text),
    Column("topology", Text),
    Column("power_limit_watts", Whole),
)

MODEL = Table(
    "autotune_model",
    METADATA,
    Column("fingerprint", Text, primary_key=True),
    _required("name", Text),
    _required("family", Text),
    _required("dtype", Text),
    _required("vision_layers", Whole),
    _required("language_layers", Whole),
    _required("parameters", Whole),
    *(_required(name, Finite) for name in ("unit_flops", "token_flops", "square_flops")),
    _required("config_digest", Text),
    Column("gradient_dtype", Text),
    Column("trained", Text),
    Column("compiler", Text),
    _required("target_flops", Finite),
)

DATA_PROFILE = Table(
    "autotune_data_profile",
    METADATA,
    Column("fingerprint", Text, primary_key=True),
    _required("samples", Whole),
    _required("text_only_samples", Whole),
    _required("vision_units", Whole),
    _required("text_tokens", Whole),
    _required("longest_text_tokens", Whole),
    _required("most_vision_units", Whole),
    _required("histogram", JSON),
    _required("lengths_digest", Text),
    Column("target_tokens", Whole),
)

WORKLOAD = Table(
    "autotune_workload",
    METADATA,
    Column("fingerprint", Text, primary_key=True),
    _required("hardware_fingerprint", Text, ForeignKey(HARDWARE.c.fingerprint), index=True),
    _required("model_fingerprint", Text, ForeignKey(MODEL.c.fingerprint), index=True),
    _required("data_fingerprint", Text, ForeignKey(DATA_PROFILE.c.fingerprint)),
    *(_required(name, Text) for name in _VERSIONS),
    _required("oversize", Text),
    _required("global_batch_samples", Whole),
    _required("memory_limit_bytes", Whole),
)

AGENT = Table(
    "autotune_agent",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("machine", Text),
    _required("process", Text),
    _required("started", UtcDateTime),
    _required("beats", Whole),
    Column("heard", UtcDateTime),  # time of the last heartbeat, by the clock of the database
    Column("ended", UtcDateTime),
    Column("study_id", Text),  # the study that it works on; no reference, since that study refers to agents
)

LEASE = Table(
    "autotune_lease",
    METADATA,
    Column("resource", Text, primary_key=True),
    _required("agent_id", Text, ForeignKey(AGENT.c.id), index=True),
)

STUDY = Table(
    "autotune_study",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("name", Text, unique=True),
    _required("workload_fingerprint", Text, ForeignKey(WORKLOAD.c.fingerprint), index=True),
    _required("seed", Whole),
    _required("settings", JSON),
    _required("started", UtcDateTime),
    Column("finished", UtcDateTime),
    Column("calibration_state", Text),
    Column("leader_id", Text, ForeignKey(AGENT.c.id)),
    Column("archived", UtcDateTime),
)

PLAN = Table(
    "autotune_plan",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("pipeline", Whole),
    _required("data", Whole),
    _required("zero", Whole),
    _required("tensor", Whole),
    Column("qv", Whole),
    Column("qt", Whole),
    _required("document", Text),
)

TRIAL = Table(
    "autotune_trial",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("study_id", Text, ForeignKey(STUDY.c.id)),
    Column("agent_id", Text, ForeignKey(AGENT.c.id)),
    _required("number", Whole),
    _required("plan_id", Text, ForeignKey(PLAN.c.id), index=True),
    _required("role", Text),
    _required("parameters", JSON),
    _required("status", Text),
    _required("started", UtcDateTime),
    Column("finished", UtcDateTime),
    Column("given_up", UtcDateTime),
    UniqueConstraint("study_id", "number"),
    CheckConstraint("status IN ('running', 'finished', 'abandoned')", name="status"),
    CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
)

OUTCOME = Table(
    "autotune_outcome",
    METADATA,
    Column("trial_id", Text, ForeignKey(TRIAL.c.id), primary_key=True),
    _required("kind", Text),
    Column("measured_samples_per_second", Finite),
    Column("epoch_seconds", Finite),
    Column("epoch_seconds_error", Finite),
    Column("peak_bytes", Whole),
    Column("disturbance", Text),
    Column("energy_joules", Finite),
    Column("seconds", Finite),
    Column("failure_kind", Text),
    Column("failure_detail", Text),
    Column("failure_stage", Whole),
    _required("document", Text),
)

ATTEMPT = Table(
    "autotune_attempt",
    METADATA,
    Column("trial_id", Text, ForeignKey(TRIAL.c.id), primary_key=True),
    Column("number", Whole, primary_key=True, autoincrement=False),
    _required("kind", Text),
    Column("epoch_seconds", Finite),
    _required("disturbance", Text),
    _required("document", Text),
)
"""A disturbed run, which was repeated; the run that counts is the outcome."""

STAGE_MEASUREMENT = Table(
    "autotune_stage_measurement",
    METADATA,
    Column("trial_id", Text, ForeignKey(TRIAL.c.id), primary_key=True),
    Column("rank", Whole, primary_key=True, autoincrement=False),
    _required("stage", Whole),
    _required("data_rank", Whole),
    _required("tensor_rank", Whole),
    _required("load_seconds", Finite),
    _required("forward_seconds", Finite),
    _required("backward_seconds", Finite),
    _required("optimizer_seconds", Finite),
    _required("idle_seconds", Finite),
    _required("peak_bytes", Whole),
    _required("static_bytes", Whole),
)

LAYER_PROFILE = Table(
    "autotune_layer_profile",
    METADATA,
    Column("hardware_fingerprint", Text, ForeignKey(HARDWARE.c.fingerprint), primary_key=True),
    Column("model_fingerprint", Text, ForeignKey(MODEL.c.fingerprint), primary_key=True),
    *(Column(name, Text, primary_key=True) for name in _VERSIONS),
    _required("created", UtcDateTime),
    _required("document", Text),
)

BEST_PLAN = Table(
    "autotune_best_plan",
    METADATA,
    Column("study_id", Text, ForeignKey(STUDY.c.id), primary_key=True),
    _required("plan_id", Text, ForeignKey(PLAN.c.id), index=True),
    _required("workload_fingerprint", Text, ForeignKey(WORKLOAD.c.fingerprint), index=True),
    _required("epoch_seconds", Finite),
    _required("epoch_seconds_error", Finite),
    _required("estimated_samples_per_second", Finite),
    _required("estimated_samples_per_second_error", Finite),
    _required("baselines", Text),
    _required("created", UtcDateTime),
    _required("search_seconds", Finite),
    Column("confidence", Finite),
    _required("ties", Text),
    _required("pareto", Text),
    Column("explanation", Text),
)

LAUNCH = Table(
    "autotune_launch",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("plan_id", Text, ForeignKey(PLAN.c.id), index=True),
    _required("workload_fingerprint", Text, ForeignKey(WORKLOAD.c.fingerprint), index=True),
    _required("started", UtcDateTime),
    Column("promised_samples_per_second", Finite),
    _required("status", Text),
    Column("finished", UtcDateTime),
    Column("steps", Whole),
    Column("training_samples_per_second", Finite),
    Column("agent_id", Text, ForeignKey(AGENT.c.id)),
    CheckConstraint("status IN ('running', 'finished', 'paused', 'failed', 'interrupted')", name="status"),
    CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
)

LAUNCH_WINDOW = Table(
    "autotune_launch_window",
    METADATA,
    Column("launch_id", Text, ForeignKey(LAUNCH.c.id), primary_key=True),
    Column("first_step", Whole, primary_key=True, autoincrement=False),
    _required("last_step", Whole),
    _required("step_seconds", Finite),
    _required("training_samples_per_second", Finite),
    _required("tokens_per_second", Finite),
    Column("promised_samples_per_second", Finite),
    _required("parts", Text),
)

BUNDLE = Table(
    "autotune_bundle",
    METADATA,
    Column("digest", Text, primary_key=True),
    _required("source", Text),
    _required("exported", UtcDateTime),
    _required("imported", UtcDateTime),
)

PROVENANCE = Table(
    "autotune_provenance",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    _required("bundle_digest", Text, ForeignKey(BUNDLE.c.digest), index=True),
)
"""The bundle that a row was imported with; rows without an entry are local."""

NOTE = Table(
    "autotune_note",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    _required("text", Text),
)
"""A user's text on a study or a plan; `kind` is the name of its table."""

TAG = Table(
    "autotune_tag",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
)

DELETED = Table(
    "autotune_deleted",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    _required("deleted", UtcDateTime),
)
"""The ids of deleted studies, trials and trainings, whose results may still arrive."""

JOINED: Mapping[Table, FromClause] = {
    WORKLOAD: WORKLOAD.join(HARDWARE).join(MODEL).join(DATA_PROFILE),
    # Outer joins, so that `autotune db check` sees a trial without its plan as well.
    TRIAL: TRIAL.outerjoin(PLAN).outerjoin(OUTCOME),
    BEST_PLAN: BEST_PLAN.join(PLAN).join(WORKLOAD).join(HARDWARE).join(MODEL).join(DATA_PROFILE),
}
"""Tables whose values are read from several tables, with their joins."""
