"""The tables. Keys are natural: fingerprints of values, UUIDs of events.

JSON columns hold only what no query filters by. Documents of `trials.wire` are stored as its canonical text.
"""

import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

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
    """A 64-bit integer. Raises TypeError for another type of value, which a damaged SQLite file may hold."""

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


class Base(DeclarativeBase):
    metadata = MetaData(
        # Migrations can only change constraints by name, and each database would choose names of its own.
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {str: Text, int: Whole, float: Finite, datetime: UtcDateTime}  # noqa: RUF012


class HardwareRow(Base):
    __tablename__ = "autotune_hardware"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    accelerator: Mapped[str]
    device_name: Mapped[str]
    devices: Mapped[int]
    device_memory_bytes: Mapped[int]
    compute_capability: Mapped[str | None]
    driver: Mapped[str | None]
    cpu_name: Mapped[str]
    cpu_cores: Mapped[int]
    ram_bytes: Mapped[int]
    nodes: Mapped[int] = mapped_column(server_default=text("1"))
    link: Mapped[str | None]
    topology: Mapped[str | None]


class ModelRow(Base):
    __tablename__ = "autotune_model"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    family: Mapped[str]
    dtype: Mapped[str]
    vision_layers: Mapped[int]
    language_layers: Mapped[int]
    parameters: Mapped[int]
    unit_flops: Mapped[float]
    token_flops: Mapped[float]
    square_flops: Mapped[float]
    config_digest: Mapped[str]
    gradient_dtype: Mapped[str | None]


class DataProfileRow(Base):
    __tablename__ = "autotune_data_profile"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    samples: Mapped[int]
    text_only_samples: Mapped[int]
    vision_units: Mapped[int]
    text_tokens: Mapped[int]
    longest_text_tokens: Mapped[int]
    most_vision_units: Mapped[int]
    histogram: Mapped[list[list[int]]] = mapped_column(JSON)
    lengths_digest: Mapped[str]


class WorkloadRow(Base):
    __tablename__ = "autotune_workload"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    hardware_fingerprint: Mapped[str] = mapped_column(ForeignKey(HardwareRow.fingerprint), index=True)
    model_fingerprint: Mapped[str] = mapped_column(ForeignKey(ModelRow.fingerprint), index=True)
    data_fingerprint: Mapped[str] = mapped_column(ForeignKey(DataProfileRow.fingerprint))
    python: Mapped[str]
    torch: Mapped[str]
    deepspeed: Mapped[str]
    transformers: Mapped[str]
    oversize: Mapped[str]
    global_batch_samples: Mapped[int]
    memory_limit_bytes: Mapped[int]

    hardware: Mapped[HardwareRow] = relationship(lazy="joined", innerjoin=True)
    model: Mapped[ModelRow] = relationship(lazy="joined", innerjoin=True)
    data: Mapped[DataProfileRow] = relationship(lazy="joined", innerjoin=True)


class AgentRow(Base):
    __tablename__ = "autotune_agent"

    id: Mapped[str] = mapped_column(primary_key=True)
    machine: Mapped[str]
    process: Mapped[str]
    started: Mapped[datetime]
    beats: Mapped[int]
    heard: Mapped[datetime | None]
    """Time of the last heartbeat, by the clock of the database."""
    ended: Mapped[datetime | None]


class LeaseRow(Base):
    __tablename__ = "autotune_lease"

    resource: Mapped[str] = mapped_column(primary_key=True)
    agent_id: Mapped[str] = mapped_column(ForeignKey(AgentRow.id), index=True)


class StudyRow(Base):
    __tablename__ = "autotune_study"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    workload_fingerprint: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.fingerprint), index=True)
    seed: Mapped[int]
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    started: Mapped[datetime]
    finished: Mapped[datetime | None]
    lessons: Mapped[str | None]
    leader_id: Mapped[str | None] = mapped_column(ForeignKey(AgentRow.id))


class PlanRow(Base):
    __tablename__ = "autotune_plan"

    id: Mapped[str] = mapped_column(primary_key=True)
    pipeline: Mapped[int]
    data: Mapped[int]
    zero: Mapped[int]
    qv: Mapped[int | None]
    qt: Mapped[int | None]
    document: Mapped[str]


class TrialRow(Base):
    __tablename__ = "autotune_trial"
    __table_args__ = (
        UniqueConstraint("study_id", "number"),
        CheckConstraint("status IN ('running', 'finished', 'abandoned')", name="status"),
        CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(ForeignKey(StudyRow.id))
    agent_id: Mapped[str | None] = mapped_column(ForeignKey(AgentRow.id))
    number: Mapped[int]
    plan_id: Mapped[str] = mapped_column(ForeignKey(PlanRow.id), index=True)
    role: Mapped[str]
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str]
    started: Mapped[datetime]
    finished: Mapped[datetime | None]
    given_up: Mapped[datetime | None]

    # Not joined by default: after a wait for the lock of a trial, PostgreSQL reads that row anew, but no joined row.
    plan: Mapped[PlanRow] = relationship()
    outcome: Mapped["OutcomeRow | None"] = relationship()
    attempts: Mapped[list["AttemptRow"]] = relationship(lazy="selectin", order_by="AttemptRow.number")


class OutcomeRow(Base):
    __tablename__ = "autotune_outcome"

    trial_id: Mapped[str] = mapped_column(ForeignKey(TrialRow.id), primary_key=True)
    kind: Mapped[str]
    samples_per_second: Mapped[float | None]
    epoch_seconds: Mapped[float | None]
    epoch_seconds_error: Mapped[float | None]
    peak_bytes: Mapped[int | None]
    contamination: Mapped[str | None]
    energy_joules: Mapped[float | None]
    seconds: Mapped[float | None]
    failure_kind: Mapped[str | None]
    failure_detail: Mapped[str | None]
    failure_stage: Mapped[int | None]
    document: Mapped[str]


class AttemptRow(Base):
    """A disturbed run, which was repeated; the run that counts is the outcome."""

    __tablename__ = "autotune_attempt"

    trial_id: Mapped[str] = mapped_column(ForeignKey(TrialRow.id), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    epoch_seconds: Mapped[float | None]
    contamination: Mapped[str]
    document: Mapped[str]


class StageMeasurementRow(Base):
    __tablename__ = "autotune_stage_measurement"

    trial_id: Mapped[str] = mapped_column(ForeignKey(TrialRow.id), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stage: Mapped[int]
    data_rank: Mapped[int]
    load_seconds: Mapped[float]
    forward_seconds: Mapped[float]
    backward_seconds: Mapped[float]
    optimizer_seconds: Mapped[float]
    idle_seconds: Mapped[float]
    peak_bytes: Mapped[int]
    static_bytes: Mapped[int]


class LayerProfileRow(Base):
    __tablename__ = "autotune_layer_profile"

    hardware_fingerprint: Mapped[str] = mapped_column(ForeignKey(HardwareRow.fingerprint), primary_key=True)
    model_fingerprint: Mapped[str] = mapped_column(ForeignKey(ModelRow.fingerprint), primary_key=True)
    python: Mapped[str] = mapped_column(primary_key=True)
    torch: Mapped[str] = mapped_column(primary_key=True)
    deepspeed: Mapped[str] = mapped_column(primary_key=True)
    transformers: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[datetime]
    document: Mapped[str]


class BestPlanRow(Base):
    __tablename__ = "autotune_best_plan"

    study_id: Mapped[str] = mapped_column(ForeignKey(StudyRow.id), primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey(PlanRow.id), index=True)
    workload_fingerprint: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.fingerprint), index=True)
    epoch_seconds: Mapped[float]
    epoch_seconds_error: Mapped[float]
    samples_per_second: Mapped[float]
    samples_per_second_error: Mapped[float]
    baselines: Mapped[str]
    created: Mapped[datetime]
    search_seconds: Mapped[float]
    confidence: Mapped[float | None]
    ties: Mapped[str]
    pareto: Mapped[str]

    plan: Mapped[PlanRow] = relationship(lazy="joined", innerjoin=True)
    workload: Mapped[WorkloadRow] = relationship(lazy="joined", innerjoin=True)


class LaunchRow(Base):
    __tablename__ = "autotune_launch"
    __table_args__ = (
        CheckConstraint("status IN ('running', 'finished', 'failed', 'interrupted')", name="status"),
        CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey(PlanRow.id), index=True)
    workload_fingerprint: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.fingerprint), index=True)
    started: Mapped[datetime]
    predicted_samples_per_second: Mapped[float | None]
    status: Mapped[str]
    finished: Mapped[datetime | None]
    steps: Mapped[int | None]
    samples_per_second: Mapped[float | None]
    agent_id: Mapped[str | None] = mapped_column(ForeignKey(AgentRow.id))


class BundleRow(Base):
    __tablename__ = "autotune_bundle"

    digest: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    exported: Mapped[datetime]
    imported: Mapped[datetime]


class ProvenanceRow(Base):
    """The bundle that a row was imported with; rows without an entry are local."""

    __tablename__ = "autotune_provenance"

    kind: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    bundle_digest: Mapped[str] = mapped_column(ForeignKey(BundleRow.digest), index=True)
