"""Training with the packs of the best plan in a plain PyTorch loop.

    python plain_loop.py job.yaml
    torchrun --nproc-per-node 2 plain_loop.py job.yaml

The job has pretrained weights. Learning rate, betas and weight decay are those of the job; there is no schedule and no
clipping.
"""

import argparse
import contextlib
import os
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from autotune import PackCollator, PackSampler, SampleDataset, best_plan

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("job", help="job file with a best plan")
job = arguments.parse_args().job
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if ranks > 1:
    distributed.init_process_group("nccl" if on_gpu else "gloo")

samples = SampleDataset(job)
settings = samples.job.training
ignored = settings.model_dump(
    include={"freeze", "learning_rates", "lora", "loss_weighting", "max_steps"}, exclude_defaults=True
)
if ignored:
    sys.exit(
        f"training.{', training.'.join(ignored)}: this loop does not follow it; remove it, or use `autotune launch`"
    )
model = AutoModelForImageTextToText.from_pretrained(samples.job.model.path, dtype=torch.float32).to(device).train()
sampler = PackSampler(samples, best_plan(job).plan, rank=rank, ranks=ranks)
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PackCollator(samples, model))

network = DistributedDataParallel(model) if ranks > 1 else model
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
    {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)

for epoch in range(settings.epochs):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for step in sampler.steps:
        total = torch.zeros((), device=device)
        for pack in range(step.packs):
            batch = {
                name: value.to(device) if torch.is_tensor(value) else value for name, value in next(batches).items()
            }
            is_last = pack == step.packs - 1
            with contextlib.nullcontext() if is_last or ranks == 1 else network.no_sync():
                loss = network(**batch, num_items_in_batch=step.target_tokens).loss
                (loss * ranks).backward()  # DDP averages gradients over the ranks
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} step {step.number} loss {total:.7f}", flush=True)

if ranks > 1:
    # A reducer that frees the process group holds the GIL, which a thread of Gloo may need to end.
    del network
    distributed.destroy_process_group()
