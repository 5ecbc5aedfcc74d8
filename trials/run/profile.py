"""Times each kind of layer alone: one of each is enough, however large the model."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from deepspeed import comm

from trials.engine.memory import SavedTensorMeter
from trials.model.cut import Cut
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule, pack_loss
from trials.model.weights import draw_buffers, draw_weights
from trials.run.report import LayerKind, LayerTiming, ProfileReport
from trials.run.request import Profile, Request

_TEXT_TOKENS = 256
_REDUCED_BYTES = 8 << 20
_ONE_OF_EACH = Cut(
    vision=range(1),
    language=range(1),
    recompute_vision=0,
    recompute_language=0,
    embeds=True,
    projects=True,
    heads=True,
)


def run_profile(request: Request, task: Profile, device: torch.device) -> ProfileReport:
    """Times every kind of layer at the sizes of `task`, on this rank's device."""
    settings = request.job.model
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    stage = StageModule(build_skeleton(config, getattr(torch, settings.dtype)), _ONE_OF_EACH)
    draw_weights(stage.model, stage.paths, request.job.training.seed, device)
    draw_buffers(stage.model, stage.chain.rotary, device)
    profiler = _Profiler(stage, device, task.repeats)
    timings = [profiler.time(probe) for probe in _probes(stage, task, device)]
    return ProfileReport(
        timings=tuple(timings),
        parameters=tuple((kind, _count(stage, paths)) for kind, paths in _paths_by_kind(stage).items()),
        optimizer_seconds_per_parameter=profiler.time_optimizer(),
        reduce_seconds_per_byte=profiler.time_reduction(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """One kind of layer with one input."""

    layer: LayerKind
    units: int = 0
    tokens: int = 0
    squares: int = 0
    inputs: tuple[torch.Tensor, ...]
    run: Callable[..., torch.Tensor]


def _probes(stage: StageModule, task: Profile, device: torch.device) -> Iterator[_Probe]:
    family, model = stage.family, stage.model
    layer = model.get_submodule(stage.chain.vision_layers[0])
    image_token = family.image_token(model.config)
    for index, units in enumerate(task.unit_counts):
        pixels = torch.randn(units, *family.unit_shape(model.config), device=device)
        states = family.embed_vision(model, pixels).detach()
        images = torch.full((units * family.unit_tokens(model.config)[1],), image_token, device=device)
        # Text in turns more and less, so that its share can be told from the images'.
        text = torch.zeros(_TEXT_TOKENS * (index % 2), dtype=torch.long, device=device)
        ids = torch.cat((images, text))
        yield _Probe(
            layer="vision_embedding", units=units, inputs=(pixels,), run=lambda x: family.embed_vision(model, x)
        )
        yield _Probe(layer="vision", units=units, inputs=(states,), run=lambda x: family.vision_layer(layer, x))
        yield _Probe(layer="projector", units=units, tokens=len(ids), inputs=(states, ids), run=stage.join_text)
    for samples, length in task.sample_shapes:
        tokens = samples * length
        positions = torch.arange(length, device=device).repeat(samples)
        states = torch.randn(1, tokens, model.config.get_text_config().hidden_size, device=device, dtype=model.dtype)
        target = (torch.zeros(tokens, dtype=torch.long, device=device), torch.ones((), device=device))
        size = {"tokens": tokens, "squares": samples * length**2}
        yield _Probe(layer="language", **size, inputs=(states, positions), run=stage.language)
        yield _Probe(layer="head", tokens=tokens, inputs=(states,), run=lambda x, t=target: pack_loss(stage.head(x), t))


class _Profiler:
    def __init__(self, stage: StageModule, device: torch.device, repeats: int) -> None:
        self._stage, self._device, self._repeats = stage, device, repeats

    def time(self, probe: _Probe) -> LayerTiming:
        """Medians over the repeats, after one run that is not counted."""
        runs = [self._run(probe) for _ in range(self._repeats + 1)][1:]
        forward, backward, kept, output = zip(*runs, strict=True)
        return LayerTiming(
            layer=probe.layer,
            units=probe.units,
            tokens=probe.tokens,
            squares=probe.squares,
            forward_seconds=statistics.median(forward),
            backward_seconds=statistics.median(backward),
            kept_bytes=max(kept),
            output_bytes=max(output),
        )

    def _run(self, probe: _Probe) -> tuple[float, float, int, int]:
        """(forward seconds, backward seconds, kept bytes, output bytes)."""
        first, *rest = probe.inputs
        # Inner layers pass a gradient on to the layer before them; pixels do not.
        first = first.detach().clone().requires_grad_(probe.layer != "vision_embedding")
        meter = SavedTensorMeter(self._stage.parameters(), 0, 1 << 62)
        with meter.watch():
            start = self._now()
            output = probe.run(first, *rest)
            forwarded = self._now()
            kept = meter.live_bytes
            output.backward(torch.ones_like(output))
            backwarded = self._now()
        return forwarded - start, backwarded - forwarded, kept, output.numel() * output.element_size()

    def time_optimizer(self) -> float:
        """Seconds of an AdamW step, per parameter."""
        parameters = list(self._stage.parameters())
        optimizer = torch.optim.AdamW(parameters)
        seconds = []
        for _ in range(self._repeats + 1):
            start = self._now()
            optimizer.step()
            seconds.append(self._now() - start)
        return statistics.median(seconds[1:]) / sum(parameter.numel() for parameter in parameters)

    def time_reduction(self) -> float:
        """Seconds per byte of averaging gradients over all ranks."""
        if comm.get_world_size() == 1:
            return 0.0
        gradients = torch.zeros(_REDUCED_BYTES // 4, device=self._device)
        seconds = []
        for _ in range(self._repeats + 1):
            start = self._now()
            comm.all_reduce(gradients)
            seconds.append(self._now() - start)
        return statistics.median(seconds[1:]) / _REDUCED_BYTES

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _paths_by_kind(stage: StageModule) -> dict[str, tuple[str, ...]]:
    chain = stage.chain
    return {
        "vision_embedding": chain.vision_embedding,
        "vision": chain.vision_layers[:1],
        "projector": chain.projector,
        "language": chain.language_layers[:1],
        "head": chain.head,
    }


def _count(stage: StageModule, paths: tuple[str, ...]) -> int:
    return sum(parameter.numel() for path in paths for parameter in stage.model.get_submodule(path).parameters())
