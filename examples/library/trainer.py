"""Training with the packs of the best plan by the `Trainer` of transformers.

    python trainer.py job.yaml
    torchrun --nproc-per-node 2 trainer.py job.yaml

The job has pretrained weights. Learning rate, betas, weight decay and clipping are those of the job; there is no
schedule.
"""

import argparse
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

from autotune import EvenPackSampler, PackCollator, PackSampler, SampleDataset, best_plan


class PackTrainer(Trainer):
    """A `Trainer` with a batch sampler of its own."""

    def __init__(self, packs: EvenPackSampler, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.packs = packs
        # transformers says of Qwen2.5-VL, Qwen3-VL and GLM-4V that their loss does not count the targets of a step. The
        # Trainer would then take the mean of each pack, and empty packs would reduce the gradient.
        self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not prepared by accelerate, which would distribute the packs of this rank over the ranks again.
        return DataLoader(self.train_dataset, batch_sampler=self.packs, collate_fn=self.data_collator)


class PrintLoss(TrainerCallback):
    """Print the loss of each step."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.7f}", flush=True)


arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("job", help="job file with a best plan")
job = arguments.parse_args().job
samples = SampleDataset(job)
settings = samples.job.training
ignored = settings.model_dump(
    include={"freeze", "learning_rates", "lora", "loss_weighting", "max_steps"}, exclude_defaults=True
)
if ignored:
    sys.exit(
        f"training.{', training.'.join(ignored)}: this loop does not follow it; remove it, or use `autotune launch`"
    )
model = AutoModelForImageTextToText.from_pretrained(samples.job.model.path, dtype=torch.float32)
arguments = TrainingArguments(
    output_dir=str(settings.output / "trainer"),
    num_train_epochs=1,  # the sampler has the packs of all epochs
    optim="adamw_torch",
    learning_rate=settings.learning_rate,
    lr_scheduler_type="constant",
    weight_decay=settings.weight_decay,
    adam_beta1=settings.betas[0],
    adam_beta2=settings.betas[1],
    max_grad_norm=settings.clip_norm or 0.0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
if arguments.n_gpu > 1:
    sys.exit(
        f"one process sees {arguments.n_gpu} GPUs, and the Trainer would cut each pack into as many parts; start this "
        "with torchrun, a process for each GPU, or set CUDA_VISIBLE_DEVICES to one of them"
    )
sampler = PackSampler(samples, best_plan(job).plan, rank=arguments.process_index, ranks=arguments.world_size)
packs = EvenPackSampler(sampler, settings.epochs)
arguments.gradient_accumulation_steps = packs.micro_batches
PackTrainer(
    packs,
    model=model,
    args=arguments,
    train_dataset=samples,
    data_collator=PackCollator(samples, model),
    callbacks=[PrintLoss()],
).train()
