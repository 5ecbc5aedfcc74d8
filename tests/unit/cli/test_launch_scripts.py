"""What `init --from` makes of launch scripts as other trainers publish them."""

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from autotune.cli import main
from autotune.draft.shell_script import NoValue, commands_of
from autotune.job_file import load_job
from tests.programs.users import refusal
from trials.job import Job

QWEN_VL = r"""
# Distributed training configuration
NPROC_PER_NODE=${NPROC_PER_NODE:-4}
NNODES=${WORLD_SIZE:-2}
MASTER_PORT=${MASTER_PORT:-$(shuf -i 20001-29999 -n 1)}
llm=MODEL  # Using HuggingFace model ID
batch_size=4
# Training arguments
args="
    --model_name_or_path "${llm}" \
    --dataset_use train.jsonl \
    --data_flatten True \
    --tune_mm_vision False \
    --tune_mm_mlp True \
    --tune_mm_llm True \
    --bf16 \
    --per_device_train_batch_size ${batch_size} \
    --per_device_eval_batch_size $((batch_size*2)) \
    --gradient_accumulation_steps 4 \
    --max_pixels 50176 \
    --save_strategy "steps" \
    --learning_rate 2e-7 \
    --report_to wandb"
# Launch training
WANDB_MODE=offline torchrun --nproc_per_node=${NPROC_PER_NODE} --nnodes ${NNODES} \
         --master_port=${MASTER_PORT} \
         qwenvl/train/train_qwen.py ${args}
"""

LLAVA = r"""
deepspeed --num_gpus 8 llava/train/train_mem.py \
    --model_name_or_path MODEL \
    --data_path train.jsonl \
    --mm_projector_type mlp2x_gelu \
    --bf16 True \
    --per_device_train_batch_size 16 \
    --save_strategy "epoch" --save_steps 1 \
    --learning_rate 2e-5 \
    --model_max_length 2048 OPTIONS
"""

SWIFT = r"""
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=2 \
MAX_PIXELS=1003520 \
swift sft --model MODEL --dataset train.jsonl --train_type lora \
    --gradient_accumulation_steps $(expr 16 / 2) --max_length 2048
"""

MEGATRON = r"""
NPROC_PER_NODE=2 megatron sft --model MODEL --dataset train.jsonl \
    --tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 4 \
    --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 --freeze_vit true
"""

TRL = r"""
accelerate launch --config_file zero3.yaml --num_processes 8 examples/scripts/sft_vlm.py \
    --dataset_name train.jsonl --model_name_or_path MODEL --per_device_train_batch_size 8 --use_peft \
    --lora_target_modules=all-linear
"""

TRAINER = r"""
srun -p ${PARTITION} --nodes=2 --ntasks=16 --ntasks-per-node=8 ${SRUN_ARGS} \
  python -u train.py --model_name_or_path MODEL --data_path train.jsonl \
  --per_device_train_batch_size 4 --bf16 True OPTIONS --learning_rate 1e-5 2>&1 | tee log.txt
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)


def converted(script: str, *arguments: str) -> tuple[Job, str]:
    """The job that `init` writes, and its notes."""
    Path("run.sh").write_text(script)
    Path("job.yaml").unlink(missing_ok=True)
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "run.sh", *arguments])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), "\n".join(json.loads(answer.stdout)["notes"])


def test_a_quoted_text_over_several_lines_becomes_the_words_of_a_command() -> None:
    job, notes = converted(QWEN_VL)
    assert (job.hardware.devices, job.training.global_batch_samples) == (8, 4 * 4 * 8)
    assert (job.training.learning_rate, job.training.freeze) == (2e-7, ("vision",))
    assert (job.model.dtype, job.training.checkpoint_every) == ("bfloat16", None)
    assert "Left to the search for a plan: data_flatten" in notes
    assert "change these there, if they have such a setting: max_pixels: 50176" in notes


def test_what_qwen_vl_does_otherwise_than_its_arguments_say_is_told() -> None:
    """Its script cuts no sample, and ignores vision_tower_lr without mm_projector_lr."""
    script = QWEN_VL.replace("--tune_mm_vision False", "--tune_mm_vision True --vision_tower_lr 1e-6")
    job, notes = converted(script.replace("--bf16", "--model_max_length 8192 --bf16"))
    assert (job.data.oversize, job.data.max_tokens) == ("own-pack", None)
    assert job.training.learning_rates.vision is None
    assert "model_max_length (it cuts no sample there)" in notes
    assert "vision_tower_lr (it has no effect there without mm_projector_lr)" in notes
    assert "there it is the mean of those of its micro-batches" in notes
    both = script.replace("--bf16", "--mm_projector_lr 1e-5 --bf16")
    rates = converted(both)[0].training.learning_rates
    assert (rates.vision, rates.projector) == (1e-6, 1e-5)


def test_adapters_of_ms_swift_by_name_are_in_every_part() -> None:
    named = SWIFT.replace("--train_type lora", "--train_type lora --target_modules q_proj v_proj")
    job, notes = converted(named)
    assert (job.training.lora.parts, job.training.lora.targets) == (("language",), ("q_proj", "v_proj"))
    assert "Layers with the names of the adapters have one in every part there" in notes
    assert "in every part" not in converted(SWIFT)[1]


def test_llama_factory_has_no_adapters_of_the_projector_unless_they_are_named() -> None:
    arguments = {"finetuning_type": "lora", "dataset": "d", "model_name_or_path": "MODEL", "lora_target": "all"}
    words = " ".join(f"--{name} {value}" for name, value in arguments.items())
    script = f"llamafactory-cli train {words} --stage sft --freeze_multi_modal_projector false\n"
    job, notes = converted(script)
    assert job.training.lora.parts == ("language",)
    assert "there it is the mean of those of its micro-batches" in notes
    named = converted(script.replace("lora_target all", "lora_target q_proj,linear_1"))[0]
    assert named.training.lora.parts == ("projector", "language")


def test_parts_that_qwen_vl_is_not_told_to_train_are_frozen() -> None:
    job, _ = converted(QWEN_VL.replace(r"--tune_mm_llm True \\"[:-1], "").replace("--tune_mm_vision False", ""))
    assert job.training.freeze == ("vision", "language")


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ("", ("vision",)),
        pytest.param("--unfreeze_mm_vision_tower True", (), marks=pytest.mark.long),
        ("--tune_mm_mlp_adapter True", ("vision", "language")),
        pytest.param("--freeze_mm_mlp_adapter True", ("vision", "projector"), marks=pytest.mark.long),
        ('--mm_tunable_parts="mm_mlp_adapter"', ("vision", "language")),
        pytest.param(
            '--mm_tunable_parts="mm_vision_tower,mm_mlp_adapter,mm_language_model"', (), marks=pytest.mark.long
        ),
    ],
)
def test_a_script_of_llava_trains_the_parts_that_llava_trains(options: str, frozen: tuple[str, ...]) -> None:
    job, _ = converted(LLAVA.replace("OPTIONS", options))
    assert job.training.freeze == frozen
    assert job.training.lora.rank is None
    assert job.training.global_batch_samples == 128
    assert job.training.checkpoint_every is None


def test_adapters_of_llava_are_in_the_language_model_and_its_projector_trains_whole() -> None:
    training = converted(LLAVA.replace("OPTIONS", "--lora_enable True --mm_projector_lr 1e-5"))[0].training
    assert (training.lora.rank, training.lora.alpha, training.lora.parts) == (64, 16, ("language",))
    assert training.lora.train_projector
    assert training.learning_rates.projector == 1e-5


def test_the_environment_of_ms_swift_says_processes_and_image_limits() -> None:
    job, notes = converted(SWIFT)
    assert (job.hardware.devices, job.training.global_batch_samples) == (2, 16)
    assert "change these there, if they have such a setting: max_pixels: 1003520" in notes
    assert "so the training differs: max_length: 2048" in notes
    assert job.model.dtype == "bfloat16"
    assert "`auto`" in notes


def test_ms_swift_without_a_number_of_processes_starts_one() -> None:
    job, notes = converted(SWIFT.replace("NPROC_PER_NODE=2 ", " "))
    assert job.training.global_batch_samples == 8
    assert "A step has 8 samples: 1 per device x 8 accumulation steps x 1 device" in notes
    job, _ = converted(SWIFT.replace("NPROC_PER_NODE=2", "NPROC_PER_NODE=$(nvidia-smi -L | wc -l)"), "--devices", "4")
    assert job.training.global_batch_samples == 8 * 4


def test_megatrons_names_are_read_for_megatron_swift() -> None:
    job, notes = converted(MEGATRON)
    training = job.training
    assert (training.global_batch_samples, training.learning_rate, training.warmup) == (4, 1e-5, 0.05)
    assert (training.lora.rank, training.freeze, training.schedule) == (None, ("vision", "projector"), "cosine")
    assert "so the training differs: min_lr: 1e-6" in notes


def test_defaults_of_trl_are_those_of_its_trainer() -> None:
    training = converted(TRL)[0].training
    assert (training.learning_rate, training.lora.rank, training.lora.alpha) == (2e-5, 16, 32)
    assert (training.lora.targets, training.global_batch_samples) == (None, 64)
    assert converted(TRL.replace("--use_peft", "--use_peft false"))[0].training.lora.rank is None


def test_a_configuration_of_trl_has_the_defaults_of_trl() -> None:
    Path("sft.yaml").write_text("model_name_or_path: MODEL\ndataset_name: train.jsonl\npacking: true\n")
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "sft.yaml"])
    assert answer.exit_code == 0, answer.output
    job = load_job(Path("job.yaml"))
    assert (job.model.dtype, job.training.learning_rate, job.data.max_tokens) == ("bfloat16", 2e-5, 1024)
    assert "Taken from a configuration of TRL" in json.loads(answer.stdout)["notes"]


def test_a_loss_on_prompts_is_named_since_a_job_has_none() -> None:
    assert "so the training differs: assistant_only_loss: False" in converted(TRL)[1]
    for flag in ("--assistant_only_loss", "--completion_only_loss true"):
        assert "differs" not in converted(TRL.replace("--use_peft", f"{flag} --use_peft"))[1]
    whole = converted(TRL.replace("--use_peft", "--completion_only_loss false --use_peft"))[1]
    assert "differs: assistant_only_loss: False, completion_only_loss: false" in whole


def test_the_global_batch_is_that_of_the_script_on_any_number_of_devices() -> None:
    job, notes = converted(TRAINER.replace("OPTIONS", ""), "--devices", "2")
    assert (job.hardware.devices, job.training.global_batch_samples) == (2, 64)
    assert "A step has 64 samples: 4 per device x 1 accumulation step x 16 devices" in notes
    assert job.training.learning_rate == 1e-5


def test_a_batch_of_unknown_parts_is_not_made_up() -> None:
    job, notes = converted(TRAINER.replace("OPTIONS", "--gradient_accumulation_steps $STEPS"))
    assert job.training.global_batch_samples == Job.model_validate(job.model_dump()).training.global_batch_samples == 32
    assert "not that of the script, which does not set gradient_accumulation_steps" in notes


@pytest.mark.parametrize(("packs", "is_named"), [("--use_packed_ds True", True), ("--use_packed_ds False", False)])
def test_a_step_of_packs_is_named_where_its_samples_are_not_known(packs: str, is_named: bool) -> None:
    _, notes = converted(TRAINER.replace("OPTIONS", packs))
    assert ("A step has 64 packs" in notes) == is_named
    assert ("counts packs until you multiply it" in notes) == is_named


def test_a_model_that_a_script_joins_from_parts_has_to_be_given() -> None:
    script = TRAINER.replace("--model_name_or_path MODEL", "--llm_path qwen --vision_path vit").replace("OPTIONS", "")
    job, notes = converted(script, "MODEL", "train.jsonl")
    assert job.model.path == str(Path("MODEL").absolute())
    assert "the job does not join the parts of one: llm_path: qwen, vision_path: vit" in notes
    Path("run.sh").write_text(script)
    assert "MODEL is missing" in refusal("init", "--from", "run.sh", "--out", "b.yaml")[1]


def test_a_share_of_all_steps_is_named() -> None:
    job, notes = converted(TRAINER.replace("OPTIONS", "--save_steps 0.1 --eval_steps 0.2"))
    assert (job.training.checkpoint_every, job.evaluation.every) == (None, None)
    assert "save_steps: 0.1 is a share of all steps; give training.checkpoint_every a number of steps" in notes
    assert "eval_steps: 0.2 is a share" in notes


def test_the_data_sets_of_qwen_vl_are_those_that_it_names_with_their_percentages() -> None:
    job, notes = converted(QWEN_VL.replace("--dataset_use train.jsonl", "--dataset_use train.jsonl%20 --data_path x"))
    assert [(source.path.name, source.sampling) for source in job.data.sources] == [("train.jsonl", "random:20%")]
    assert "Not taken over: data_path (dataset_use replaces it)" in notes


def test_only_what_has_the_form_of_a_hub_id_is_to_be_downloaded() -> None:
    _, notes = converted(TRAINER.replace("MODEL", "/models/InternVL3-8B").replace("OPTIONS", ""))
    assert "/models/InternVL3-8B is no folder here; give the folder of the model as model.path" in notes
    assert "run `hf download org/name`" in converted(TRAINER.replace("MODEL", "org/name").replace("OPTIONS", ""))[1]


def test_a_model_and_data_that_are_given_replace_those_of_the_script() -> None:
    script = TRAINER.replace("MODEL", "org/name").replace("OPTIONS", "--image_folder pictures")
    job, notes = converted(script.replace("train.jsonl", "gone.json"), "MODEL", "train.jsonl")
    assert job.data.sources[0].images is None
    assert "For DATA, settings of the sources in run.sh are left out: images: pictures" in notes
    assert "hf download" not in notes
    assert "gone.json" not in notes


@pytest.mark.parametrize(
    "flag",
    [
        "--use_lora true",
        *(pytest.param(flag, marks=pytest.mark.long) for flag in ("--lora_enable True", "--use_peft", "--lora_r 4")),
    ],
)
def test_adapters_are_never_read_as_full_fine_tuning(flag: str) -> None:
    assert converted(TRAINER.replace("OPTIONS", flag))[0].training.lora.rank is not None


def test_a_pattern_of_layers_with_adapters_is_named() -> None:
    job, notes = converted(
        TRAINER.replace("OPTIONS", r'--use_lora true --lora_target_modules "llm\..*\.(q_proj|v_proj)"')
    )
    assert job.training.lora.targets is None
    assert "is a pattern" in notes


def test_what_changes_the_training_is_named_with_its_value() -> None:
    _, notes = converted(TRAINER.replace("OPTIONS", "--optim adafactor --bits 4 --drop_path_rate 0.1 --tf32 True"))
    assert "so the training differs: bits: 4, drop_path_rate: 0.1, optim: adafactor" in notes
    assert "Not taken over: tf32" in notes
    _, notes = converted(TRAINER.replace("OPTIONS", "--optim adamw_torch --bits 16 --drop_path_rate 0.0"))
    assert "differs" not in notes


@pytest.mark.parametrize(
    "program",
    [
        "internvl/train/internvl_chat_dpo.py",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("examples/grpo_vlm.py", "train_reward.py")),
    ],
)
def test_preference_and_reward_training_is_refused(program: str) -> None:
    Path("run.sh").write_text(TRAINER.replace("OPTIONS", "").replace("train.py", program))
    code, text = refusal("init", "--from", "run.sh")
    assert code == 2
    assert f"{program}: only supervised fine-tuning can be trained here" in text


def test_a_script_that_names_a_configuration_says_so() -> None:
    Path("run.sh").write_text("FORCE_TORCHRUN=1 llamafactory-cli train examples/sft.yaml")
    assert "it names examples/sft.yaml: give that" in refusal("init", "--from", "run.sh")[1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a 'b c' \"d $X\" $Y", ["a", "b c", "d x y", "p", "q"]),
        ("a \\\n  --b  # a comment\n", ["a", "--b"]),
        ("a --b 1 2>&1", ["a", "--b", "1"]),
        ("a > log.txt --b", ["a", "--b"]),
        ('ARGS=(--b "c d")\nARGS+=(--e)\na "${ARGS[@]}"', ["a", "--b", "c d", "--e"]),
        ('ARGS=(\n --b "c d" # more\n --e\n)\na ${ARGS[*]} f', ["a", "--b", "c", "d", "--e", "f"]),
        ('C="a --b"\nC="$C --d"\neval $C', ["a", "--b", "--d"]),
        ('if [ "$X" = "x y" ]; then\nZ=1\nelse\nZ=2\nfi\na $Z', ["a", "1"]),
        ('if [ -z "$X" ]; then\nZ=1\nelse\nZ=2\nfi\na $Z', ["a", "2"]),
        ("a ${Z:-$((2 * 3))} ${EMPTY} ${EMPTY:-b}", ["a", "6", "b"]),
        ("a $(expr 16 / 2)", ["a", "8"]),
        ("a $((64 / (2 * (3 + 1)))) b", ["a", "8", "b"]),
        ("cat <<EOF > f\nit's\nEOF\na", ["a"]),
    ],
)
def test_the_last_command_has_the_words_that_a_shell_gives_it(script: str, words: list[str]) -> None:
    commands = list(commands_of(f"X='x y'\nY='p q'\nEMPTY=\n{script}"))
    assert list(commands[-1].words) == words


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("C='eval $C'\neval $C", "nested too deeply"),
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 30, "the variable A is too long"),
        ("a ${B:-c", "does not end"),
        ("A=(b", "a list in brackets does not end"),
    ],
)
def test_a_script_without_an_end_is_refused(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(commands_of(script))


@given(script=st.text(alphabet="ab=1 \n\t$(){}[]<>|&;'\"`\\#@*-:", max_size=60))
def test_any_text_is_read_to_its_end(script: str) -> None:
    with contextlib.suppress(ValueError):
        list(commands_of(f"A=(b c)\n{script}"))


@pytest.mark.parametrize("word", ["$1", "$UNSET", "$(date)", "`date`", "${X//a/b}", "$@", "$((UNSET + 1))"])
def test_a_word_that_the_script_does_not_set_has_no_value(word: str) -> None:
    (command,) = commands_of(f"X=a\na --b={word}")
    assert command.words == ("a", NoValue("--b="))
