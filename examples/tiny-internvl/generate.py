"""Makes a small InternVL and a small dataset for it, with no network: `python generate.py`."""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from scenes import Scene, draw, facts, questions, random_scene
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import InternVLConfig, PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

VERSION = 1
"""Raised when the model or the data become different."""
SAMPLES = 2000
TILE = 56
NAMED = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
SPECIAL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where model/ and data/ are made")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    arguments = parser.parse_args()
    made = generate(arguments.folder, arguments.samples)
    print(f"{arguments.folder}: {'made model/ and data/' if made else 'model/ and data/ are up to date'}")


def generate(folder: Path, samples: int) -> bool:
    """Makes `model` and `data` in the folder unless both are complete and of this version; tells whether it did."""
    mark = json.dumps({"version": VERSION, "samples": samples})
    marks = [folder / name / "generated.json" for name in ("model", "data")]
    if all(path.is_file() and path.read_text() == mark for path in marks):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as name:
        partial = Path(name)
        records = make_data(partial / "data", samples)
        make_model(partial / "model", (turn["value"] for record in records for turn in record["conversations"]))
        for made in ("model", "data"):
            (partial / made / "generated.json").write_text(mark)
            if (folder / made).exists():
                shutil.rmtree(folder / made)
            (partial / made).rename(folder / made)
    return True


# --- data ---


def make_data(folder: Path, samples: int) -> list[dict[str, Any]]:
    """Writes `train.jsonl` and `images/` in InternVL's format; returns the records."""
    (folder / "images").mkdir(parents=True)
    random = Random(0)
    records = [make_record(folder, number, random) for number in range(samples)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return records


def make_record(folder: Path, number: int, random: Random) -> dict[str, Any]:
    """About 8 % of text alone, 80 % with one image, 12 % with two or three."""
    images = random.choices((0, 1, 2, 3), (8, 80, 8, 4))[0]
    words = random_words(random)
    scenes = [random_scene(random, least=5 if words > 90 else 1) for _ in range(max(images, 1))]
    sizes = [random_size(random) for _ in range(images)]
    names = [f"images/{number:06}-{place}.png" for place in range(images)]
    for name, scene, size in zip(names, scenes, sizes, strict=False):
        draw(scene, *size).save(folder / name, compress_level=1)
    record: dict[str, Any] = {"id": number}
    if images == 1:
        record |= {"image": names[0], "width": sizes[0][0], "height": sizes[0][1]}
    elif images:
        record |= {"image": names, "width_list": [w for w, _ in sizes], "height_list": [h for _, h in sizes]}
    return record | {"conversations": conversation(scenes, images, words, random)}


def random_size(random: Random) -> tuple[int, int]:
    """(width, height): 36 % for one tile, 25 % for three, 10 % for four and 29 % for five, thumbnail included."""
    aspect, least, most = random.choices(
        ((1.0, 56, 76), (2.0, 56, 115), (3.0, 56, 78), (1.0, 84, 220), (4.0, 56, 60)), (36, 25, 10, 24, 5)
    )[0]
    short = random.randint(least, most)
    long = round(short * aspect * random.uniform(0.98, 1.02))
    return (long, short) if random.random() < 0.5 else (short, long)


def random_words(random: Random) -> float:
    """About how many words a conversation has: few are long, as in instruction data."""
    return min(random.lognormvariate(math.log(26), 1.1), 350)


def conversation(scenes: list[Scene], images: int, words: float, random: Random) -> list[dict[str, str]]:
    """Descriptions, questions and answers about the scenes, until there are so many words or nothing is left to say."""
    opening = "<image>\n" * images or f"Think of a picture. {' '.join(facts(scenes[0], random)[:4])}\n"
    told, asked = about(scenes, random)
    exchanges: list[tuple[str, str]] = []
    while words > 0 and (told or asked):
        if told and (not asked or random.random() < 0.4):
            count = random.randint(1, 1 + int(words // 16))
            exchanges.append(("Describe it." if images < 2 else "Describe them.", " ".join(told[:count])))
            del told[:count]
        else:
            exchanges.append(asked.pop())
        words -= sum(len(text.split()) + 5 for text in exchanges[-1])
    turns = [
        {"from": side, "value": text} for pair in exchanges for side, text in zip(("human", "gpt"), pair, strict=True)
    ]
    turns[0]["value"] = opening + turns[0]["value"]
    return turns


def about(scenes: list[Scene], random: Random) -> tuple[list[str], list[tuple[str, str]]]:
    """All facts, and all questions with their answers; with several pictures each says which it means."""
    if len(scenes) == 1:
        return facts(scenes[0], random), questions(scenes[0], random)
    told = [f"Picture {n}: {fact}" for n, scene in enumerate(scenes, 1) for fact in facts(scene, random)]
    asked = [
        (f"Picture {n}: {ask}", answer) for n, scene in enumerate(scenes, 1) for ask, answer in questions(scene, random)
    ]
    random.shuffle(told)
    random.shuffle(asked)
    return told, asked


# --- model ---


def make_model(folder: Path, texts: Iterable[str]) -> None:
    """Writes the configuration, tokenizer and image processor; the weights are drawn when a run starts."""
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    size = {"height": TILE, "width": TILE}
    GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=1, max_patches=4, size=size).save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the dataset, with InternVL's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIAL.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens=SPECIAL,
        chat_template=CHAT_TEMPLATE,
        **NAMED,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    """12 vision layers of width 128 and 8 language layers of width 192: 16 tokens to a tile."""
    vision = {
        "num_hidden_layers": 12,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "image_size": [TILE, TILE],
        "patch_size": [7, 7],
    }
    text = {
        "model_type": "qwen2",
        "num_hidden_layers": 8,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.get_vocab()[SPECIAL["context_image_token"]],
        image_seq_length=16,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        architectures=["InternVLForConditionalGeneration"],
    )


if __name__ == "__main__":
    main()
