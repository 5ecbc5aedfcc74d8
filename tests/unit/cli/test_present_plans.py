"""`init --from` writes the current settings of another trainer as a plan file next to the job."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from autotune.plan_file import read_plan
from tests.programs.users import refusal
from tests.tiny_models import qwen2_5_vl
from trials.plan import SIMPLE_PACKER, Layout, Packed, Padded, Plan
from trials.stage import Stage

UNITS = (1 << 31) - 1
LENGTH_ALONE = Packed(qv=UNITS, qt=4096, qv_min=UNITS, qt_min=4096, packer=SIMPLE_PACKER)
SWIFT = "model: MODEL\ndataset: train.json\ntrain_type: full\ntorch_dtype: bfloat16\nmax_length: 4096\n"
FACTORY = (
    "model_name_or_path: MODEL\nfinetuning_type: full\ndataset: demo\nbf16: true\ncutoff_len: 4096\n"
    "per_device_train_batch_size: 1\n"
)
AXOLOTL = "base_model: MODEL\ndatasets: [{path: train.json}]\nsequence_len: 2048\nmicro_batch_size: 2\nbf16: true\n"
TRL = "model_name_or_path: MODEL\ndataset_name: train.json\nmax_length: 4096\nper_device_train_batch_size: 1\n"
SERIES = (
    "deepspeed src/train/train_sft.py --model_id MODEL --data_path train.json --image_folder . --bf16 True "
    "--freeze_merger False --per_device_train_batch_size 4 --gradient_accumulation_steps 1"
)
INTERNVL = (
    "torchrun --nproc_per_node=2 internvl_chat_finetune.py --model_name_or_path MODEL --conv_style internvl2_5 "
    "--meta_path train.json --bf16 True --per_device_train_batch_size 1"
)
MEGATRON = "megatron sft --model MODEL --dataset train.json --max_length 4096 --micro_batch_size 1 --packing true"
QWEN_VL = (
    "torchrun --nproc_per_node=2 train.py --model_name_or_path MODEL --dataset_use train.json --bf16 True "
    "--tune_mm_llm True --per_device_train_batch_size 1"
)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of a model with 4 vision and 4 language layers."""
    made = tmp_path_factory.mktemp("model")
    qwen2_5_vl.make(made)
    return (made / "config.json").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, configuration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "config.json").write_text(configuration)
    (tmp_path / "train.json").write_text("[]\n")
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "host.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    )
    monkeypatch.chdir(tmp_path)


def converted(content: str) -> tuple[Path | None, str]:
    """The file that the job names as its current plan, and the notes."""
    name = "run.yaml" if ": " in content.partition("\n")[0] else "run.sh"
    Path(name).write_text(content)
    answer = CliRunner().invoke(main, ["init", "--json", "--devices", "2", "--from", name])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")).search.current_plan, "\n".join(json.loads(answer.stdout)["notes"])


def plan(packing: Padded | Packed, zero: int, vision: bool, language: bool) -> Plan:
    return Plan(
        packing=packing,
        layout=Layout(pipeline=1, data=2, zero=zero),  # type: ignore[arg-type]  # a literal
        stages=(Stage(vision=4, language=4, recompute_vision=4 * vision, recompute_language=4 * language),),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{SWIFT}packing: true\ndeepspeed: zero2", plan(LENGTH_ALONE, 2, True, True)),
        (f"{SWIFT}packing: true\npacking_length: 4096\nmax_length: 2048".replace("max_length: 4096\n", ""),
         plan(LENGTH_ALONE, 1, True, True)),
        pytest.param(f"{SWIFT}vit_gradient_checkpointing: false\ndeepspeed: mine.json",
                     plan(Padded(samples=1), 2, False, True), marks=pytest.mark.long),
        pytest.param(f"{SWIFT}padding_free: true\ngradient_checkpointing: false",
                     plan(Padded(samples=1), 1, False, False), marks=pytest.mark.long),
        (f"{FACTORY}neat_packing: true\ndeepspeed: examples/ds_z3_config.json", plan(LENGTH_ALONE, 3, True, True)),
        pytest.param(f"{FACTORY}disable_gradient_checkpointing: true", plan(Padded(samples=1), 1, False, False),
                     marks=pytest.mark.long),
        (f"{AXOLOTL}sample_packing: true\ngradient_checkpointing: true\ndeepspeed: deepspeed_configs/zero1.json",
         plan(LENGTH_ALONE, 1, True, True)),
        (f"{AXOLOTL}fsdp: [full_shard, auto_wrap]", plan(Padded(samples=2), 3, False, False)),
        pytest.param(f"{TRL}packing: true", plan(LENGTH_ALONE, 1, True, True), marks=pytest.mark.long),
        (f"{TRL}fp16: false\nbf16: false\ngradient_checkpointing: false", plan(Padded(samples=1), 0, False, False)),
        (f"{SERIES} --deepspeed scripts/zero3.json --gradient_checkpointing True",
         plan(Padded(samples=4), 3, True, True)),
        (f"{INTERNVL} --use_packed_ds True --max_packed_tokens 4096 --deepspeed zero_stage1_config.json",
         plan(Packed(qv=40, qt=4096, qv_min=40, qt_min=4096, packer=SIMPLE_PACKER), 1, True, True)),
        pytest.param(INTERNVL, plan(Padded(samples=1), 1, True, True), marks=pytest.mark.long),
        (f"{MEGATRON} --recompute_granularity full --recompute_method uniform --recompute_num_layers 1",
         plan(LENGTH_ALONE, 1, True, True)),
        pytest.param(f"{QWEN_VL} --data_flatten True", plan(Padded(samples=1), 1, False, False),
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_present_settings_become_the_current_plan(content: str, expected: Plan) -> None:
    file, notes = converted(content)
    assert file == Path("job-current-plan.json").absolute(), notes
    assert read_plan(file) == expected
    assert "The search compares with your present settings, in job-current-plan.json: pipeline 1 x data 2" in notes


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f"{SWIFT}per_device_train_batch_size: 4\npadding_free: true", "padding_free: a plan pads micro-batches of 4"),
        (f"{SWIFT}packing: true".replace("max_length: 4096\n", ""), "packing: such packs, or packs without a length"),
        pytest.param(f"{FACTORY}packing: true", "packing: such packs, or packs without a length",
                     marks=pytest.mark.long),
        (f"{SWIFT}deepspeed: zero3_offload", "zero3_offload is not here, and no stage without offload"),
        (f"{SWIFT}deepspeed: host.json", "offload_optimizer: a plan keeps weights and optimizer on the devices"),
        (f"{SWIFT}sequence_parallel_size: 2", "sequence_parallel_size: such a split"),
        (f"{AXOLOTL}gradient_checkpointing: offload", "gradient checkpointing 'offload': a plan has it on or off"),
        (f"{AXOLOTL}group_by_length: true", "group_by_length: a plan does not group samples"),
        (f"{AXOLOTL}fsdp_config: {{reshard_after_forward: true}}", "fsdp: only full_shard"),
        pytest.param(f"{TRL}packing: true\npacking_strategy: wrapped", "packing: such packs", marks=pytest.mark.long),
        (f"{SERIES} --deepspeed $CONFIG", "the configuration does not say deepspeed"),
        ("accelerate launch sft_vlm.py --model_name_or_path MODEL --dataset_name train.json "
         "--per_device_train_batch_size 1", "the configuration of accelerate, which was not read"),
        (MEGATRON, "gradient checkpointing 'recompute_granularity selective'"),
        pytest.param(f"{QWEN_VL} --data_packing True", "data_packing: such packs", marks=pytest.mark.long),
        (SWIFT.replace("MODEL", "org/model"), "without the folder of the model its layers are not known"),
        (SWIFT.replace("MODEL", "."), "has no config.json"),
    ],
)  # fmt: skip
def test_what_no_plan_expresses_is_named(content: str, reason: str) -> None:
    file, notes = converted(content)
    assert file is None
    said = next(note for note in notes.splitlines() if "does not compare with your present settings: " in note)
    assert reason in said
    assert not Path("job-current-plan.json").exists()


def test_where_a_plan_is_not_to_the_letter_what_was_configured_is_said() -> None:
    _, notes = converted(f"{AXOLOTL}sample_packing: true")
    assert "; 2 packs of 2048 tokens in a micro-batch are one pack of 4096; without ZeRO there would be no" in notes


def test_the_stage_by_the_name_of_a_file_that_is_not_here_is_said() -> None:
    assert (
        "; ZeRO 3 is by the name far/ds_z3.json, which is no file here"
        in converted(f"{SWIFT}deepspeed: far/ds_z3.json")[1]
    )


def test_a_job_without_a_configuration_has_no_current_plan() -> None:
    answer = CliRunner().invoke(main, ["init", "MODEL", "train.json", "--devices", "2"])
    assert answer.exit_code == 0
    assert "present settings" not in answer.output
    assert load_job(Path("job.yaml")).search.current_plan is None


def test_a_plan_that_is_there_is_not_overwritten() -> None:
    Path("job-current-plan.json").write_text("mine")
    Path("run.yaml").write_text(SWIFT)
    assert "job-current-plan.json exists and is not overwritten" in refusal("init", "--from", "run.yaml")[1]
    assert Path("job-current-plan.json").read_text() == "mine"
    assert not Path("job.yaml").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "has no object zero_optimization"), ("{", "cannot be read"), ('{"zero_optimization": 2}', "no object")],
)
def test_a_broken_configuration_of_deepspeed_is_refused(content: str, message: str) -> None:
    Path("mine.json").write_text(content)
    Path("run.yaml").write_text(f"{SWIFT}deepspeed: mine.json")
    assert message in refusal("init", "--from", "run.yaml")[1]
