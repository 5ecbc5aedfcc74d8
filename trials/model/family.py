"""The contract of a model family: what the modules of `trials.model.families` offer to the rest of the package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials import plugins
from trials.data.records.sample import Encoder
from trials.errors import ModelError, UnknownName

LanguageRunner: TypeAlias = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""(a language layer, states [1, T, hidden]) -> states [1, T, hidden]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModules:
    """The vision side of a model, in the order of the chain. Together they hold every parameter of that side once."""

    embedding: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]
    """The layers that a plan distributes over the stages. States keep their shape from layer to layer."""
    projector: tuple[nn.Module, ...]


class Family(Protocol):
    """Models of one architecture in transformers: one module, whose name is the configuration's `model_type`.

    A family knows its configuration, how samples are encoded, the vision tower, and how images and text meet in the
    language model. What all families share is elsewhere: cutting, recomputation, weights, memory and schedule.

    Sizes: a *vision unit* is what the tower's work is counted in (a tile, or a merged patch where images keep their own
    resolution); all units of a model have the same shape. T is the number of tokens of a pack, image tokens included.
    Functions of a model must work on any device and dtype, and take a model from which layers of other stages were
    removed.
    """

    AUTO_MODEL: Any
    """The transformers class whose `from_config` and `from_pretrained` build the model."""
    OTHER_FORMS: Mapping[str, str]
    """Each `model_type` that has the same models in a form that cannot be read, and which form to use instead."""

    # --- the configuration ---

    def check(self, config: PretrainedConfig) -> None:
        """Raise ModelError for an option that the functions below do not follow. Called before the model is built."""

    def unit_flops(self, config: PretrainedConfig, *, tower: int, projector: int) -> float:
        """Return the floating-point operations of the forward pass of one vision unit, tower and projector together.

        `tower` and `projector` count parameters; that of `tower` includes the embedding.
        """

    def random_images(self, config: PretrainedConfig, units: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (pixels, ids of the image tokens) of images with `units` vision units in all, on the CPU.

        Pixels are float32 [units, *unit_shape] as `Encoder.encode` returns them, drawn from a normal distribution. The
        ids are int64 [image tokens]: those that the projected features replace.
        """

    def shrink_vision(self, settings: dict[str, Any], layers: int) -> None:
        """Reduce the vision side of a configuration, given as a dictionary, in place.

        It keeps `layers` layers with few narrow heads, and units of few patches, so that a step takes milliseconds.
        The vocabulary has been reduced to VOCABULARY tokens (`trials/model/shrunk.py`), and the ids of image tokens
        must lie in it.
        """

    # --- data ---

    def encoder(self, model_path: str, trust_remote_code: bool = False, max_tokens: int | None = None) -> Encoder:
        """Return the encoder of a model folder, which cuts samples to `max_tokens`.

        Raise ModelError where the tokenizer, the image processor and the configuration do not fit together.
        """

    # --- the model ---

    def vision_modules(self, model: PreTrainedModel) -> VisionModules:
        """Return the modules of the vision side of a whole model, which may be on the meta device."""

    def embed_vision(self, model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
        """Return the states before the first vision layer from pixels [units, *unit_shape]."""

    def vision_layer(self, layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Return the states after one vision layer, in the shape of `states`. May run twice, for recomputation."""

    def join_text(self, model: PreTrainedModel, states: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Return language states [1, T, hidden] of token ids [T] and the states after the last vision layer.

        Image tokens take the projected features in order; units beyond them, such as the one of a pack without images,
        change nothing.
        """

    def language_runner(self, rotary: nn.Module, states: torch.Tensor, position_ids: torch.Tensor) -> LanguageRunner:
        """Return what runs the language layers of one pack, with all that they share computed once.

        `rotary` is the module of `Chain.rotary`, `states` [1, T, hidden] are those of the first layer to run, and
        `position_ids` [T] restart at 0 with each sample. A token sees nothing of other samples. The runner may be
        called twice for a layer, for recomputation.
        """


FAMILIES: plugins.Plugins[Family] = plugins.Plugins("trials.model.families")


def is_supported(config: PretrainedConfig) -> bool:
    """Return whether models of this kind can be trained here."""
    return _name(config.model_type) in plugins.names(FAMILIES)


def load_family(config: PretrainedConfig) -> Family:
    """Return the family of a configuration. Raise ModelError with those that exist."""
    try:
        return plugins.load(FAMILIES, _name(config.model_type))
    except UnknownName:
        known = ", ".join(name.replace("-", "_") for name in plugins.names(FAMILIES))
        raise ModelError(f"model type {config.model_type!r} is not supported; supported are: {known}") from None


def check_form(model_type: object) -> None:
    """Raise ModelError for a model in a form of which a family reads another one, with the way to get that one.

    Without this the user would be asked to trust remote code, which does not help.
    """
    for _, family in plugins.each(FAMILIES):
        if model_type in family.OTHER_FORMS:
            raise ModelError(f"model_type {model_type!r} is not supported: {family.OTHER_FORMS[str(model_type)]}")


def _name(model_type: str) -> str:
    # Plugins are named as in a job file, with `-`; transformers names `qwen2_5_vl` with `_`.
    return model_type.replace("_", "-")
