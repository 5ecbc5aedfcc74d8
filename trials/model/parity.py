"""Comparison of a model's stages with transformers' own model, on a shrunk copy of the architecture."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import IGNORED, NO_GRIDS
from trials.data.tokens import pack
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.cut import cut
from trials.model.family import Images, join_samples, load_family
from trials.model.refusals.refusal import refusing
from trials.model.shrunk import CONTEXT, VOCABULARY, shrunk
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule, pack_loss
from trials.model.weights import draw_buffers, draw_weights
from trials.plan import Layout, Packed, Plan, Stage

_TOLERANCES = {"logits": 1e-4, "loss": 1e-4, "gradients": 5e-4}
"""Rounding in float32 grows through layers with such large weights; faults are above 0.1 %."""
_FLOOR = 1e-2
"""Share of the norm of all gradients: a parameter without effect, such as the bias of keys, has rounding errors."""
_GAIN = 2.0
"""Factor on weights that would keep a signal's size, so that attention is far from uniform and caps on it show."""
_PACKING = Packed(qv=8, qt=256, qv_min=0, qt_min=0)
_NOTHING = torch.zeros(())
_REMEDY = "it is not supported; use a model whose language model is built like Llama or Qwen2"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    input_ids: torch.Tensor
    """int64 [tokens]"""
    labels: torch.Tensor
    """int64 [tokens], not shifted."""
    images: Images | None

    @property
    def grids(self) -> torch.Tensor:
        return self.images.grids if self.images else torch.from_numpy(NO_GRIDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Results:
    logits: torch.Tensor
    """[tokens of all samples, vocabulary]"""
    loss: torch.Tensor
    """Sum over the targets, []."""
    gradients: dict[str, torch.Tensor]


def check_parity(settings: ModelSection) -> None:
    """Compare stages of a shrunk copy of the model with transformers' own model, in float32 on the CPU.

    Raise ModelError with the largest difference, or with the reason why the stages or the copy cannot be run.
    """
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    name = config.get_text_config().model_type
    with _alone(), refusing(f"the language model {name!r} cannot be checked", _REMEDY):
        small = shrunk(config)
        plain = _plain_model(small)
        samples = _samples(small)
        expected = _plain_results(plain, samples)
    with _alone(), refusing(f"the language model {name!r} cannot be run in stages", _REMEDY):
        for plan in _plans(small):
            _compare(name, expected, _staged_results(small, plan, plain, samples))


@contextmanager
def _alone() -> Iterator[None]:
    """Draw from a stream of random numbers of its own, on one thread: threads of small layers wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def _plain_model(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = load_family(config).AUTO_MODEL.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights depend on the name alone, not on the order of the parameters.
            torch.manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:  # norms and biases keep what they begin with, which most are 1 or 0
                parameter.add_(noise, alpha=0.2)
            else:
                inputs = parameter[0].numel() if parameter.dim() == 4 else parameter.shape[-1]
                parameter.copy_(noise * _GAIN / inputs**0.5)
    model.eval()  # without dropout, which is drawn again in each pass
    return model


def _samples(config: PretrainedConfig) -> tuple[_Sample, ...]:
    # On both sides of the shrunk context, also without images: positions and masks may depend on a sample's length. Two
    # units are the fewest that every model takes, since some cut each image.
    return (
        _sample(config, units=10, text=2 * CONTEXT),
        _sample(config, units=0, text=5),
        _sample(config, units=2, text=4),
    )


def _sample(config: PretrainedConfig, *, units: int, text: int) -> _Sample:
    family = load_family(config)
    # Features are put in the places of tokens of videos, too.
    reserved = [*family.random_images(config, 1).input_ids.tolist(), getattr(config, "video_token_id", None)]
    usable = torch.tensor(sorted(set(range(VOCABULARY)) - set(reserved)))
    tokens = usable[torch.randint(len(usable), (text + 1,))]
    images = family.random_images(config, units) if units else None
    shown = images.input_ids if images else tokens[:0]
    return _Sample(
        input_ids=torch.cat([tokens[:1], shown, tokens[1:]]),
        labels=torch.cat([tokens[:1], torch.full_like(shown, IGNORED), tokens[1:]]),
        images=images,
    )


def _plain_results(model: PreTrainedModel, samples: tuple[_Sample, ...]) -> _Results:
    """Return the results of one forward and backward pass for each sample."""
    family, logits, losses = load_family(model.config), [], []
    for sample in samples:
        inputs = family.model_inputs(model.config, sample.input_ids, sample.images)
        output = model(**inputs, labels=sample.labels[None])
        # transformers returns the mean over the targets; `pack_loss` is a sum.
        targets = (sample.labels[1:] != IGNORED).sum()
        loss = output.loss * targets
        loss.backward()
        logits.append(output.logits[0].detach())
        losses.append(loss.detach())
    return _Results(logits=torch.cat(logits), loss=torch.stack(losses).sum(), gradients=_gradients(model))


def _plans(config: PretrainedConfig) -> tuple[Plan, Plan]:
    """Return a plan of one stage, and one of two that part in the language model and recompute all their layers."""
    chain = build_skeleton(config, torch.float32).chain
    vision, language = len(chain.vision_layers), len(chain.language_layers)
    first = language // 2
    second = language - first
    return (
        _plan(Stage(vision=vision, language=language)),
        _plan(
            Stage(vision=vision, language=first, recompute_vision=vision, recompute_language=first),
            Stage(vision=0, language=second, recompute_language=second),
        ),
    )


def _plan(*stages: Stage) -> Plan:
    return Plan(packing=_PACKING, layout=Layout(pipeline=len(stages), data=1, zero=0), stages=stages)


def _staged_results(
    config: PretrainedConfig, plan: Plan, plain: PreTrainedModel, samples: tuple[_Sample, ...]
) -> _Results:
    """Return the results of one pass of all samples as a pack."""
    stages = [_stage(config, plan, number, plain) for number in range(len(plan.stages))]
    pixels = torch.cat([sample.images.pixels for sample in samples if sample.images])
    tokens = join_samples(stages[0].family, config, [(sample.input_ids, sample.grids) for sample in samples])
    nothing = torch.tensor([IGNORED])
    labels = torch.cat([torch.cat([sample.labels[1:], nothing]) for sample in samples])
    state = pack((pixels,), tokens)
    for stage in stages:
        state = stage(state)
    logits: torch.Tensor = state  # type: ignore[assignment]  # the last stage gives no ids
    loss = pack_loss(logits, (labels, torch.tensor(1.0)))
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, gradient in _gradients(stage.model).items():
            # A tied weight on two stages has a gradient from each use.
            original = stage.tied.get(name, name)
            gradients[original] = gradients.get(original, 0) + gradient
    return _Results(logits=logits.detach(), loss=loss.detach(), gradients=gradients)


def _stage(config: PretrainedConfig, plan: Plan, number: int, plain: PreTrainedModel) -> StageModule:
    stage = StageModule(build_skeleton(config, torch.float32), cut(plan)[number])
    device = torch.device("cpu")
    draw_weights(stage.model, stage.paths, 0, device)
    draw_buffers(stage.model, stage.chain.buffers, device)
    weights = plain.state_dict()
    with torch.no_grad():
        for name, parameter in stage.model.named_parameters():
            parameter.copy_(weights[name])
    stage.tie()
    stage.eval()
    return stage


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare(name: str, expected: _Results, found: _Results) -> None:
    """Raise ModelError where logits, loss or the gradients of a parameter differ by more than rounding explains."""
    every = torch.stack([torch.linalg.vector_norm(gradient) for gradient in expected.gradients.values()]).norm().item()
    differences = {
        "logits": _difference(found.logits, expected.logits),
        "loss": _difference(found.loss, expected.loss),
        "gradients": max(
            _difference(found.gradients.get(each, _NOTHING), expected.gradients.get(each, _NOTHING), _FLOOR * every)
            for each in expected.gradients.keys() | found.gradients.keys()
        ),
    }
    if not all(difference <= _TOLERANCES[what] for what, difference in differences.items()):  # NaN is a difference too
        figures = ", ".join(f"{what} by {100 * value:.3g} %" for what, value in differences.items())
        raise ModelError(
            f"the language model {name!r} is computed differently here than by transformers, {figures}; {_REMEDY}"
        )


def _difference(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, relative to the norm of what is expected."""
    difference, size = (torch.linalg.vector_norm(each).item() for each in (found - expected, expected))
    return float(difference / (size + floor))
