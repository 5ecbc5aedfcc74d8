"""Comparison of a model's stages with transformers' own model, on a shrunk copy of the architecture."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import IGNORED
from trials.data.tokens import pack
from trials.errors import ModelError, TrialsError
from trials.job import ModelSection
from trials.model.cut import cut
from trials.model.ends.head_loss import targets_of
from trials.model.family import join_samples
from trials.model.plain.between import check_between
from trials.model.plain.small_copy import (
    SmallResults,
    SmallSample,
    alone,
    gradients_of,
    plain_model,
    plain_results,
    relative_difference,
    small_samples,
)
from trials.model.refusals.refusal import reason, refusing
from trials.model.refusals.structure import text_of
from trials.model.shrunk import shrunk
from trials.model.skeleton import Chain, build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import draw_buffers, draw_weights
from trials.plan import Layout, Packed, Plan
from trials.stage import Stage

_TOLERANCES = {"logits": 1e-4, "loss": 1e-4, "gradients": 5e-4}
"""Rounding in float32 grows through layers with such large weights; faults are above 0.1 %."""
_FLOOR = 1e-2
"""Share of the norm of all gradients: a parameter without effect, such as the bias of keys, has rounding errors."""
_PACKING = Packed(qv=8, qt=256, qv_min=0, qt_min=0)
_NOTHING = torch.zeros(())
_REMEDY = "it is not supported; use a model whose language model is built like Llama or Qwen2"
_CORRECT = "transformers itself cannot run a small copy of it; correct its config.json, or use another model"


def check_parity(settings: ModelSection) -> None:
    """Compare stages of a shrunk copy of the model with transformers' own model.

    Raise ModelError as `compare_stages` does, or with the reason why there is no such copy.
    """
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    with refusing(_cannot_be_checked(config), _REMEDY):
        small = shrunk(config)
    compare_stages(small)


def compare_stages(small: PretrainedConfig) -> None:
    """Compare stages of a small model with transformers' own model, in float32 on the CPU.

    Raise ModelError with the largest difference, or with the reason why either cannot be run.
    """
    name = small.get_text_config().model_type
    with alone(), refusing(_cannot_be_checked(small), _CORRECT):
        plain = plain_model(small)
        samples = small_samples(small)
        expected = plain_results(plain, samples)
    chain = build_skeleton(small, torch.float32).chain
    with alone(), refusing(f"the language model {name!r} cannot be run in stages", _REMEDY), _named_module():
        check_between(plain, chain, next(sample for sample in samples if not sample.images))
        for plan in _plans(chain):
            _compare(name, expected, _staged_results(small, plan, plain, samples))


def _cannot_be_checked(config: PretrainedConfig) -> str:
    return f"the language model {text_of(config).model_type!r} cannot be checked"


@contextmanager
def _named_module() -> Iterator[None]:
    """Raise ValueError with the module that cannot run a pack, where its error does not say what is wrong."""
    try:
        yield
    except (TrialsError, ValueError, OSError, ImportError):
        raise
    except Exception as error:
        frames = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        inner = [type(each).__name__ for each in frames if isinstance(each, nn.Module)]
        where = f"its {inner[-1]} fails" if inner else "it fails"
        raise ValueError(
            f"{where} on a pack, for which layers get no mask of all tokens and no cache ({reason(error)})"
        ) from error


def _plans(chain: Chain) -> tuple[Plan, Plan]:
    """Return a plan of one stage, and one of two that part in the language model and recompute all their layers."""
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
    config: PretrainedConfig, plan: Plan, plain: PreTrainedModel, samples: tuple[SmallSample, ...]
) -> SmallResults:
    """Return the results of one pass of all samples as a pack."""
    stages = [_stage(config, plan, number, plain) for number in range(len(plan.stages))]
    pixels = torch.cat([sample.images.pixels for sample in samples if sample.images])
    tokens = join_samples(stages[0].family, config, [(sample.input_ids, sample.grids) for sample in samples])
    nothing = torch.tensor([IGNORED])
    labels = torch.cat([torch.cat([sample.labels[1:], nothing]) for sample in samples])
    state = pack((pixels,), tokens)
    for stage in stages:
        state = stage(state)
    states: torch.Tensor = state  # type: ignore[assignment]  # the last stage gives no ids
    loss = stages[-1].loss(states, targets_of(labels, torch.tensor(1.0)))
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, gradient in gradients_of(stage.model).items():
            # A tied weight on two stages has a gradient from each use.
            original = stage.tied.get(name, name)
            gradients[original] = gradients.get(original, 0) + gradient
    return SmallResults(logits=stages[-1].head(states.squeeze(0)).detach(), loss=loss.detach(), gradients=gradients)


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
    _check_buffers(stage, plain)
    return stage


def _check_buffers(stage: StageModule, plain: PreTrainedModel) -> None:
    """Raise ValueError for a buffer next to parameters that only the constructor of its module sets.

    Stages are built without memory, in which such a value is lost.
    """
    expected = dict(plain.named_buffers())
    for name, buffer in stage.model.named_buffers():
        is_computed = name.rpartition(".")[0] in stage.chain.buffers
        if not (is_computed or torch.equal(buffer, expected[name])):
            raise ValueError(f"{name} gets its value where its module is made, and stages are made without memory")


def _compare(name: str, expected: SmallResults, found: SmallResults) -> None:
    """Raise ModelError where logits, loss or the gradients of a parameter differ by more than rounding explains."""
    every = torch.stack([torch.linalg.vector_norm(gradient) for gradient in expected.gradients.values()]).norm().item()
    differences = {
        "logits": relative_difference(found.logits, expected.logits),
        "loss": relative_difference(found.loss, expected.loss),
        "gradients": max(
            relative_difference(
                found.gradients.get(each, _NOTHING), expected.gradients.get(each, _NOTHING), _FLOOR * every
            )
            for each in expected.gradients.keys() | found.gradients.keys()
        ),
    }
    if not all(difference <= _TOLERANCES[what] for what, difference in differences.items()):  # NaN is a difference too
        figures = ", ".join(f"{what} by {100 * value:.3g} %" for what, value in differences.items())
        raise ModelError(
            f"the language model {name!r} is computed differently here than by transformers, {figures}; {_REMEDY}"
        )
