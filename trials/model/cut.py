"""The part of the chain that each pipeline stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trials.errors import InvalidPlan
from trials.plan import Plan
from trials.stage import Recomputed, Tower
from trials.units import number_of

if TYPE_CHECKING:
    from trials.model.skeleton import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One stage's contiguous part of the chain."""

    vision: Sequence[int]
    """Vision layers, by their index in the model; neighbours, but for a profile."""
    language: Sequence[int]
    embeds: bool
    """Whether this is the first stage, which holds the vision embedding."""
    projects: bool
    """Whether this stage has the last vision layer, and with it the projector and the text embedding; without any
    vision layer, the first stage has both."""
    heads: bool
    """Whether this is the last stage, which holds the head and computes the loss."""
    levels: tuple[Recomputed, ...]
    """The layers that are recomputed in the backward passes of packs of each level."""
    offload_vision: bool = False
    """Whether what would be recomputed of the vision layers is offloaded instead."""
    offload_language: bool = False
    most_deferred: int = 0
    """Most packs whose weight gradients wait; 0: they are computed in the backward passes."""
    gathered_once: int = 0
    """Vision and language layers, the last ones, whose weights stay from the forward to the backward pass."""

    def offloads(self, tower: Tower) -> bool:
        """Return whether layers of this kind offload what would be recomputed."""
        return self.offload_vision if tower == "vision" else self.offload_language

    def layers(self, chain: "Chain") -> tuple[str, ...]:
        """Return the module paths of this stage's vision and language layers."""
        return (
            *(chain.vision_layers[number] for number in self.vision),
            *(chain.language_layers[number] for number in self.language),
        )

    def places(self, chain: "Chain") -> tuple[tuple[str, ...], ...]:
        """Return the module paths of what this stage runs one after the other."""
        return (
            *((chain.vision_embedding,) if self.embeds else ()),
            *((chain.vision_layers[number],) for number in self.vision),
            *((chain.projector,) if self.projects else ()),
            *((chain.language_layers[number],) for number in self.language),
            *((chain.head,) if self.heads else ()),
        )

    def paths(self, chain: "Chain") -> tuple[str, ...]:
        """Return the module paths of this stage's parameters."""
        return tuple(path for place in self.places(chain) for path in place)


def cut(plan: Plan) -> tuple[Cut, ...]:
    """Return the stages of `plan`, first to last."""
    vision_start = language_start = 0
    # A later stage without vision layers may not project: the text embedding is next to the last vision layer.
    projecting = max((number for number, stage in enumerate(plan.stages) if stage.vision), default=0)
    cuts = []
    for number, (stage, most_deferred) in enumerate(zip(plan.stages, plan.most_deferred, strict=True)):
        vision = range(vision_start, vision_start + stage.vision)
        language = range(language_start, language_start + stage.language)
        cuts.append(
            Cut(
                vision=vision,
                language=language,
                embeds=number == 0,
                projects=number == projecting,
                heads=number == len(plan.stages) - 1,
                levels=stage.recomputed,
                offload_vision=plan.layout.offloads("vision"),
                offload_language=plan.layout.offloads("language"),
                most_deferred=most_deferred,
                gathered_once=stage.gathered_once,
            )
        )
        vision_start, language_start = vision.stop, language.stop
    return tuple(cuts)


def check_layers(plan: Plan, *, vision_layers: int, language_layers: int, dtype: str) -> None:
    """Raise InvalidPlan, with the remedy, unless a model of these layers, with weights of `dtype`, can be trained.

    ZeRO 0 keeps neither float32 weights nor a float32 sum of gradients for bfloat16 weights.
    """
    if dtype == "bfloat16" and plan.layout.zero == 0:
        raise InvalidPlan(
            "bfloat16 weights cannot be trained with ZeRO 0, which keeps no float32 copy of them; use ZeRO 1"
        )
    for kind, have, want in (
        ("vision", sum(stage.vision for stage in plan.stages), vision_layers),
        ("language", sum(stage.language for stage in plan.stages), language_layers),
    ):
        if have != want:
            change = f"add {want - have}" if have < want else f"remove {have - want}"
            raise InvalidPlan(f"stages hold {number_of(have, f'{kind} layer')} but the model has {want}; {change}")
