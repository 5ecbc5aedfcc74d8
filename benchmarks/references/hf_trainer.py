"""Training of the example with transformers alone: its `Trainer`, a collator that pads, and a held-out loss.

    torchrun --nproc-per-node 2 benchmarks/references/hf_trainer.py train runs.json
    python benchmarks/references/hf_trainer.py draw model.json
    python benchmarks/references/hf_trainer.py evaluate models.json

Imports nothing from autotune: it reads the annotations, writes the turns and marks the targets by itself. InternVL's
processor needs torchvision, so its tiles come from the image processor alone, and its text is written here.
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

IGNORED = -100
ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. The file of runs has a list of these fields."""

    model: str
    """Folder with weights."""
    data: str
    """Annotation file; images are relative to its folder."""
    progress: str
    """File that gets a line after each optimizer step."""
    output: str | None = None
    """Folder for the trained model; none is saved when absent."""
    per_device: int = 4
    """Samples of a padded micro-batch."""
    global_batch: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    checkpointing: bool = True
    """Recompute every layer in the backward pass."""
    sampling: str = "random"
    """A `train_sampling_strategy` of transformers."""
    max_steps: int = -1


class Samples(Dataset[Mapping[str, Any]]):
    """Encoded samples of an annotation file in InternVL's format, each made when it is asked for."""

    def __init__(self, processor: str, data: str) -> None:
        """`processor` is a model folder with a tokenizer and an image processor."""
        config = AutoConfig.from_pretrained(processor)
        self._tokenizer = AutoTokenizer.from_pretrained(processor)
        self._images = AutoImageProcessor.from_pretrained(processor)
        self._tokens_per_tile = config.image_seq_length
        self._folder = Path(data).parent
        self._records = [json.loads(line) for line in Path(data).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        record = self._records[number]
        named = record.get("image", [])
        names = [named] if isinstance(named, str) else named
        tiles = [self._tiles(self._folder / name, len(names)) for name in names]
        input_ids, labels = self._turns(record["conversations"], [len(each) for each in tiles])
        return {"input_ids": input_ids, "labels": labels, "pixel_values": torch.cat(tiles) if tiles else None}

    def _tiles(self, path: Path, images: int) -> torch.Tensor:
        """[tiles, 3, height, width]; several images of a sample share the tiles that one may have."""
        with Image.open(path) as image:
            pixels = self._images(
                [image.convert("RGB")],
                max_patches=max(1, self._images.max_patches // images),
                return_tensors="pt",
            )["pixel_values"]
        assert isinstance(pixels, torch.Tensor)
        return pixels

    def _turns(self, turns: Sequence[Mapping[str, str]], tiles: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return token ids and labels; targets are the assistant's texts, each with the end of its turn."""
        counts = iter(tiles)
        input_ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            role, text = ROLES[turn["from"]], turn["value"]
            while "<image>" in text:
                context = "<IMG_CONTEXT>" * (self._tokens_per_tile * next(counts))
                text = text.replace("<image>", f"<img>{context}</img>", 1)
            pieces = [(f"<|im_start|>{role}\n{text}<|im_end|>\n", False)]
            if role == "assistant":
                pieces = [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>\n", True)]
            for piece, targets in pieces:
                ids = self._tokenizer(piece, add_special_tokens=False)["input_ids"]
                input_ids += ids
                labels += ids if targets else [IGNORED] * len(ids)
        return input_ids, labels


def pad(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch in which every sample is as long as the longest."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, filler: int) -> torch.Tensor:
        rows = [sample[name] for sample in samples]
        return torch.tensor([row + [filler] * (width - len(row)) for row in rows])

    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch = {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", IGNORED),
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
    }
    pixels = [sample["pixel_values"] for sample in samples if sample["pixel_values"] is not None]
    return batch | ({"pixel_values": torch.cat(pixels)} if pixels else {})


class Progress(TrainerCallback):
    """Write a line after each optimizer step, as autotune's trainings do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.is_world_process_zero:
            line = {
                "step": state.global_step,
                "seconds": time.perf_counter() - self._start,
                "samples": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            }
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        return control


def train(run: Run) -> None:
    """Train one epoch, or `max_steps`, on the ranks of torchrun."""
    set_seed(run.seed)
    model = AutoModelForImageTextToText.from_pretrained(run.model, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=f"{run.progress}.trainer",
        use_cpu=True,
        ddp_backend="gloo",
        # Layers that a micro-batch without images does not use, and a final norm that InternVL never uses.
        ddp_find_unused_parameters=True,
        per_device_train_batch_size=run.per_device,
        gradient_accumulation_steps=run.global_batch // (run.per_device * ranks()),
        activation_checkpointing=run.checkpointing,
        train_sampling_strategy=run.sampling,
        optim="adamw_torch",
        learning_rate=run.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=run.weight_decay,
        max_grad_norm=0.0,
        num_train_epochs=1,
        max_steps=run.max_steps,
        seed=run.seed,
        data_seed=run.seed,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(run.model, run.data),
        data_collator=pad,
        callbacks=[Progress(Path(run.progress))],
    )
    trainer.train()
    if run.output:
        trainer.save_model(run.output)


def ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def draw(settings: Mapping[str, Any]) -> None:
    """Save the model of `source` to `folder` with random weights, as transformers draws them from `seed`."""
    shutil.copytree(settings["source"], settings["folder"], dirs_exist_ok=True)
    set_seed(settings["seed"])
    config = AutoConfig.from_pretrained(settings["source"])
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(settings["folder"])


@torch.no_grad()
def held_out_loss(model: str, processor: str, data: str) -> dict[str, float]:
    """Return the mean loss over all target tokens of the samples, which run one by one."""
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    total, targets = 0.0, 0
    samples = Samples(processor, data)
    for number in range(len(samples)):
        batch = pad([samples[number]])
        labels = batch.pop("labels")[:, 1:]
        logits = network(**batch).logits[:, :-1]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        targets += int((labels != IGNORED).sum())
    return {"loss": total / targets, "targets": targets}


def main() -> None:
    task, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    match task:
        case "draw":
            draw(settings)
        case "evaluate":
            rest = {name: settings[name] for name in ("processor", "data")}
            print(json.dumps({model: held_out_loss(model, **rest) for model in settings["models"]}))
        case "train":
            torch.distributed.init_process_group("gloo")
            for each in settings:
                train(Run(**each))
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
