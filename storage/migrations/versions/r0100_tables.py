"""The tables of the first release, 0.1.0.

Keys and constraints are named by the convention of `storage.database.tables`.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0100"
down_revision = None

_VERSIONS = ("python", "torch", "deepspeed", "transformers")


def upgrade() -> None:
    _what_is_measured()
    _workloads()
    _studies_and_plans()
    _what_was_measured()
    _what_came_of_it()
    _what_came_from_elsewhere()
    _what_users_say()


def _what_is_measured() -> None:
    op.create_table(
        "autotune_hardware",
        _text("fingerprint", primary_key=True),
        _text("accelerator"),
        _text("device_name"),
        _integer("devices"),
        _integer("device_memory_bytes"),
        _text("compute_capability", nullable=True),
        _text("driver", nullable=True),
        _text("cpu_name"),
        _integer("cpu_cores"),
        _integer("ram_bytes"),
        _integer("nodes"),
        _text("link", nullable=True),
        _text("topology", nullable=True),
        _integer("power_limit_watts", nullable=True),
    )
    op.create_table(
        "autotune_model",
        _text("fingerprint", primary_key=True),
        _text("name"),
        _text("family"),
        _text("dtype"),
        _integer("vision_layers"),
        _integer("language_layers"),
        _integer("parameters"),
        _real("unit_flops"),
        _real("token_flops"),
        _real("square_flops"),
        _text("config_digest"),
        _text("gradient_dtype", nullable=True),
        _text("trained", nullable=True),
        _text("compiler", nullable=True),
        _real("target_flops"),
    )
    op.create_table(
        "autotune_data_profile",
        _text("fingerprint", primary_key=True),
        _integer("samples"),
        _integer("text_only_samples"),
        _integer("vision_units"),
        _integer("text_tokens"),
        _integer("longest_text_tokens"),
        _integer("most_vision_units"),
        sa.Column("histogram", sa.JSON(), nullable=False),
        _text("lengths_digest"),
        _integer("target_tokens", nullable=True),
    )


def _workloads() -> None:
    op.create_table(
        "autotune_workload",
        _text("fingerprint", primary_key=True),
        _reference("hardware_fingerprint", "hardware.fingerprint", index=True),
        _reference("model_fingerprint", "model.fingerprint", index=True),
        _reference("data_fingerprint", "data_profile.fingerprint"),
        *_texts(*_VERSIONS),
        _text("oversize"),
        _integer("global_batch_samples"),
        _integer("memory_limit_bytes"),
    )
    op.create_table(
        "autotune_layer_profile",
        _reference("hardware_fingerprint", "hardware.fingerprint", primary_key=True),
        _reference("model_fingerprint", "model.fingerprint", primary_key=True),
        *_texts(*_VERSIONS, primary_key=True),
        _time("created"),
        _text("document"),
    )


def _studies_and_plans() -> None:
    op.create_table(
        "autotune_agent",
        _text("id", primary_key=True),
        _text("machine"),
        _text("process"),
        _time("started"),
        _integer("beats"),
        _time("heard", nullable=True),
        _time("ended", nullable=True),
        _text("study_id", nullable=True),
    )
    op.create_table(
        "autotune_lease",
        _text("resource", primary_key=True),
        _reference("agent_id", "agent.id", index=True),
    )
    op.create_table(
        "autotune_study",
        _text("id", primary_key=True),
        _text("name", unique=True),
        _reference("workload_fingerprint", "workload.fingerprint", index=True),
        _integer("seed"),
        sa.Column("settings", sa.JSON(), nullable=False),
        _time("started"),
        _time("finished", nullable=True),
        _text("calibration_state", nullable=True),
        _reference("leader_id", "agent.id", nullable=True),
        _time("archived", nullable=True),
    )
    op.create_table(
        "autotune_plan",
        _text("id", primary_key=True),
        _integer("pipeline"),
        _integer("data"),
        _integer("zero"),
        _integer("tensor"),
        _integer("qv", nullable=True),
        _integer("qt", nullable=True),
        _text("document"),
    )


def _what_was_measured() -> None:
    op.create_table(
        "autotune_trial",
        _text("id", primary_key=True),
        _reference("study_id", "study.id"),
        _reference("agent_id", "agent.id", nullable=True),
        _integer("number"),
        _reference("plan_id", "plan.id", index=True),
        _text("role"),
        sa.Column("parameters", sa.JSON(), nullable=False),
        _text("status"),
        _time("started"),
        _time("finished", nullable=True),
        _time("given_up", nullable=True),
        sa.UniqueConstraint("study_id", "number"),
        sa.CheckConstraint("status IN ('running', 'finished', 'abandoned')", name="status"),
        sa.CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
    )
    op.create_table(
        "autotune_outcome",
        _reference("trial_id", "trial.id", primary_key=True),
        _text("kind"),
        _real("measured_samples_per_second", nullable=True),
        _real("epoch_seconds", nullable=True),
        _real("epoch_seconds_error", nullable=True),
        _integer("peak_bytes", nullable=True),
        _text("disturbance", nullable=True),
        _real("energy_joules", nullable=True),
        _real("seconds", nullable=True),
        _text("failure_kind", nullable=True),
        _text("failure_detail", nullable=True),
        _integer("failure_stage", nullable=True),
        _text("document"),
    )
    op.create_table(
        "autotune_attempt",
        _reference("trial_id", "trial.id", primary_key=True),
        _integer("number", primary_key=True, autoincrement=False),
        _text("kind"),
        _real("epoch_seconds", nullable=True),
        _text("disturbance"),
        _text("document"),
    )
    op.create_table(
        "autotune_stage_measurement",
        _reference("trial_id", "trial.id", primary_key=True),
        _integer("rank", primary_key=True, autoincrement=False),
        _integer("stage"),
        _integer("data_rank"),
        _integer("tensor_rank"),
        _real("load_seconds"),
        _real("forward_seconds"),
        _real("backward_seconds"),
        _real("optimizer_seconds"),
        _real("idle_seconds"),
        _integer("peak_bytes"),
        _integer("static_bytes"),
    )


def _what_came_of_it() -> None:
    op.create_table(
        "autotune_best_plan",
        _reference("study_id", "study.id", primary_key=True),
        _reference("plan_id", "plan.id", index=True),
        _reference("workload_fingerprint", "workload.fingerprint", index=True),
        _real("epoch_seconds"),
        _real("epoch_seconds_error"),
        _real("estimated_samples_per_second"),
        _real("estimated_samples_per_second_error"),
        _text("baselines"),
        _time("created"),
        _real("search_seconds"),
        _real("confidence", nullable=True),
        _text("ties"),
        _text("pareto"),
        _text("explanation", nullable=True),
    )
    op.create_table(
        "autotune_launch",
        _text("id", primary_key=True),
        _reference("plan_id", "plan.id", index=True),
        _reference("workload_fingerprint", "workload.fingerprint", index=True),
        _time("started"),
        _real("promised_samples_per_second", nullable=True),
        _text("status"),
        _time("finished", nullable=True),
        _integer("steps", nullable=True),
        _real("training_samples_per_second", nullable=True),
        _reference("agent_id", "agent.id", nullable=True),
        sa.CheckConstraint("status IN ('running', 'finished', 'paused', 'failed', 'interrupted')", name="status"),
        sa.CheckConstraint("(status = 'running') = (finished IS NULL)", name="finished"),
    )
    op.create_table(
        "autotune_launch_window",
        _reference("launch_id", "launch.id", primary_key=True),
        _integer("first_step", primary_key=True, autoincrement=False),
        _integer("last_step"),
        _real("step_seconds"),
        _real("training_samples_per_second"),
        _real("tokens_per_second"),
        _real("promised_samples_per_second", nullable=True),
        _text("parts"),
    )


def _what_came_from_elsewhere() -> None:
    op.create_table(
        "autotune_bundle",
        _text("digest", primary_key=True),
        _text("source"),
        _time("exported"),
        _time("imported"),
    )
    op.create_table(
        "autotune_provenance",
        _text("kind", primary_key=True),
        _text("key", primary_key=True),
        _reference("bundle_digest", "bundle.digest", index=True),
    )


def _what_users_say() -> None:
    of_row = "kind", "key"
    op.create_table("autotune_note", *_texts(*of_row, primary_key=True), _text("text"))
    op.create_table("autotune_tag", *_texts(*of_row, "tag", primary_key=True))
    op.create_table("autotune_deleted", *_texts(*of_row, primary_key=True), _time("deleted"))


def _text(name: str, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), **{"nullable": False, **options})


def _texts(*names: str, **options: Any) -> list[sa.Column[str]]:
    return [_text(name, **options) for name in names]


def _integer(name: str, **options: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), **{"nullable": False, **options})


def _real(name: str, **options: Any) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), **{"nullable": False, **options})


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _reference(name: str, target: str, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), sa.ForeignKey(f"autotune_{target}"), **{"nullable": False, **options})
