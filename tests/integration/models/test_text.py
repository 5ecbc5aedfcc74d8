"""Models for text alone: stages, splits and packs compute what transformers computes on the samples one by one."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, PreTrainedModel

from autotune.model_shape import model_shape
from tests.tiny_models import text
from tests.values.parameters import parameters
from tests.values.training import stage
from trials.data.loader import MicroBatch, collate
from trials.data.records.sample import IGNORED, IMAGE, Encoded, Encoder, Sample, Turn
from trials.data.tokens import pack
from trials.errors import DataError, ModelError
from trials.job import ModelSection
from trials.model.cut import cut
from trials.model.ends.head_loss import targets_of
from trials.model.families import text as text_family
from trials.model.family import load_family
from trials.model.plain.parity import check_parity
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import WeightFiles, draw_buffers, read_weights
from trials.plan import Layout, Padded, Plan

CPU = torch.device("cpu")
STAGES = {
    "one stage": ("0+4",),
    "all recomputed": ("0+4r0,4",),
    "split, some recomputed": ("0+3r0,2", "0+1"),
    "a layer on each stage": ("0+1", "0+1r0,1", "0+1", "0+1r0,1"),
}
CONVERSATIONS = (("What is in the picture?", "A red circle is in the picture."), ("Compare them: be brief.", "Both."))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small layers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHORT = ("qwen2", "qwen2 dynamic", "gemma2", "gpt_oss")
"""Kinds that between them have tied weights, positions by length, windows, caps, sinks and experts."""


def kinds(*short: str) -> list[Any]:
    return parameters({kind: kind for kind in text.KINDS}, short=short)


one_kind = pytest.mark.parametrize("folder", kinds("qwen2"), indirect=True, scope="module")
"""For what depends on the tokenizer alone"""


@pytest.fixture(scope="module", params=kinds(*SHORT))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, with weights that transformers saved."""
    folder: Path = tmp_path_factory.mktemp("model")
    text.make_kind(folder, request.param)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(str(folder)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


@pytest.fixture(scope="module")
def samples(encoder: Encoder) -> list[Encoded]:
    conversations = [CONVERSATIONS[:1], CONVERSATIONS, CONVERSATIONS[1:]]
    return [encoder.encode(conversation(*turns), pixels=True) for turns in conversations]


def conversation(*turns: tuple[str, str]) -> Sample:
    spoken = tuple(
        turn for ask, reply in turns for turn in (Turn(role="user", text=ask), Turn(role="assistant", text=reply))
    )
    return Sample(turns=spoken, images=(), image_sizes=())


def one_by_one(folder: Path, samples: list[Encoded]) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the losses of transformers' own model, and the gradients by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = 0.0
    for sample in samples:
        ids, labels = (torch.from_numpy(each)[None] for each in (sample.input_ids, sample.labels))
        loss = model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != IGNORED).sum()
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def in_stages(folder: Path, plan: Plan, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a pack, and the gradients by name; those of a weight on two stages are added."""
    stages = []
    for part in cut(plan):
        skeleton = build_skeleton(load_config(str(folder)), torch.float32)
        files = WeightFiles(folder, skeleton)
        files.check()
        stages.append(StageModule(skeleton, part))
        read_weights(stages[-1].model, stages[-1].paths, files, CPU)
        draw_buffers(stages[-1].model, stages[-1].chain.buffers, CPU)
        stages[-1].tie()
    assert batch.pixel_values is not None
    state: Any = pack((batch.pixel_values,), batch.tokens)
    for each in stages:
        state = each(state)
    loss = stages[-1].loss(state, targets_of(batch.labels, torch.tensor(1.0)))
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for each in stages:
        for name, gradient in gradients_of(each.model).items():
            first = each.tied.get(name, name)
            gradients[first] = gradients.get(first, torch.zeros(())) + gradient
    return loss.item(), gradients


@pytest.mark.parametrize(
    ("stages", "padded"),
    parameters(
        {
            f"{name}, {'padded' if padded else 'packed'}": (stages, padded)
            for name, stages in STAGES.items()
            for padded in (False, True)
        },
        short=("all recomputed, padded", "split, some recomputed, packed"),
    ),
)
def test_loss_and_gradients_equal_those_of_the_samples_one_by_one(
    folder: Path, encoder: Encoder, samples: list[Encoded], stages: tuple[str, ...], padded: bool
) -> None:
    plan = Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=len(stages), data=1, zero=0),
        stages=tuple(stage(each) for each in stages),
    )
    loss, gradients = in_stages(folder, plan, collate(samples, encoder, pixels=True, padded=padded))
    expected, wanted = one_by_one(folder, samples)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert gradients.keys() == wanted.keys()
    floor = 1e-6 * max(each.norm().item() for each in wanted.values())
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + floor, name


def test_a_small_copy_shows_that_the_model_can_be_taken(folder: Path) -> None:
    check_parity(ModelSection(path=str(folder)))
    shape = model_shape(ModelSection(path=str(folder), dtype="float32"))
    assert (shape.vision_layers, shape.language_layers, shape.unit_flops) == (0, 4, 0.0)


def refused(folder: Path, kind: str, **settings: object) -> str:
    """The message for a model of this kind with further settings, before any weight is read."""
    text.make_kind(folder, kind, **settings)
    with pytest.raises(ModelError) as caught:
        check_parity(ModelSection(path=str(folder), weights="random"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert "it has no norm and no rotary_emb next to its word embedding" in refused(tmp_path / "gpt2", "gpt2")
    assert "'bart' is not supported: it is an encoder and a decoder" in refused(tmp_path / "bart", "bart")
    message = refused(tmp_path / "gemma", "gemma3_text", use_bidirectional_attention=True)
    assert "tokens attend to each other (use_bidirectional_attention)" in message
    message = refused(tmp_path / "heads", "qwen2", num_attention_heads=5)
    assert "5 attention heads, which do not divide its hidden_size of 32; correct" in message
    message = refused(tmp_path / "dropout", "starcoder2", embedding_dropout=0.1)
    assert "embedding_dropout is 0.1, which stages do not apply; set it to 0" in message
    message = refused(tmp_path / "window", "qwen2", layer_types=["sliding_attention"] * 4)
    assert "transformers itself cannot run a small copy of it; correct its config.json, or use another" in message
    chosen = ["full_attention", *["minimax_m3_sparse"] * 3]
    indexer = {"num_hidden_layers": 4, "layer_types": chosen, "index_n_heads": 2, "index_head_dim": 32}
    message = refused(tmp_path / "chosen", "minimax_m3_vl_text", **indexer)
    assert "layers of type 'minimax_m3_sparse' choose in a way of their own which tokens are seen" in message


def test_a_model_with_parts_is_not_one_of_text_alone() -> None:
    config = Gemma3Config()
    assert text_family.takes(config.get_text_config())
    assert not text_family.takes(config)


@one_kind
def test_a_conversation_with_images_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    shown = Sample(
        turns=conversation((f"{IMAGE}What is in the picture?", "A circle.")).turns,
        images=(tmp_path / "a.png",),
        image_sizes=(None,),
    )
    with pytest.raises(DataError, match="shows images, but the model takes text alone; take the record out"):
        encoder.measure(shown, ((60, 60),))


@one_kind
def test_the_chat_template_is_the_tokenizers_own_and_replies_are_the_targets(folder: Path, encoder: Encoder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sample = conversation(*CONVERSATIONS)
    messages = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
    encoded = encoder.encode(sample, pixels=True)
    assert encoded.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert encoded.pixel_values is None
    targets = tokenizer.decode(encoded.labels[encoded.labels != IGNORED])
    assert targets == "".join(f"{reply}<|im_end|>\n" for _, reply in CONVERSATIONS)


@one_kind
def test_processes_that_measure_get_the_same_encoder(encoder: Encoder) -> None:
    copied = pickle.loads(pickle.dumps(encoder))
    sample = conversation(*CONVERSATIONS)
    assert copied.digest == encoder.digest
    assert copied.measure(sample, ()) == encoder.measure(sample, ())


@one_kind
def test_a_tokenizer_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="the chat template is missing or does not show the text of each turn once"):
        load_family(load_config(str(model))).encoder(str(model))
