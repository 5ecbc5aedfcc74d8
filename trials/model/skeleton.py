"""The model without weights: enough to find its layers, count them and cut it."""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from trials.errors import ModelError
from trials.model import hub
from trials.model.attention.packed import PACKED_ATTENTION
from trials.model.ends.patches import embed_by_matrix
from trials.model.family import Family, check_form, load_family
from trials.model.own_head import separate_head
from trials.model.paths import parameters_at
from trials.model.refusals.built_model import check_kept_types, check_output_head
from trials.model.refusals.experts import check_experts
from trials.model.refusals.folder import CONFIG, check_folder, check_place, check_settings
from trials.model.refusals.refusal import refusing
from trials.model.refusals.structure import of_ends, of_language
from trials.model.refusals.unsupported import (
    LIKE_LLAMA,
    check_code,
    check_dropout,
    check_language,
    check_quantized,
)
from trials.workload import Part

_MOST_PARAMETERS = 10**14
"""Fifty times those of the largest published models."""
_KERNELS = ("eager", "sdpa")
_SIZES = re.compile(r"head|^num_|_dim$|experts|^layer_types$")
_CORRECT = "correct its config.json, or copy or download the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Paths of the model's parts in the order in which data passes them. Every parameter lies under exactly one."""

    vision_embedding: tuple[str, ...]
    vision_layers: tuple[str, ...]
    kept: tuple[int, ...]
    """Numbers of the vision layers whose states the projector takes too."""
    added: int
    """Number of the first language layers behind which features of the projector are added."""
    behind: tuple[str, ...]
    """The first of `projector`, which belong to the vision tower: what it has behind its layers."""
    projector: tuple[str, ...]
    """What comes between the layers: the end of the vision tower, the projector, and the text embedding last."""
    language_layers: tuple[str, ...]
    head: tuple[str, ...]
    """The final norm and the output projection."""
    unused: tuple[str, ...]
    """Parts that no stage holds, because nothing runs them."""
    rotary: str
    """Positions of the language layers."""
    buffers: tuple[str, ...]
    """Modules without parameters whose buffers are computed, such as `rotary`; every stage has them."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Every path that holds parameters of a stage."""
        return (*self.vision_embedding, *self.vision_layers, *self.projector, *self.language_layers, *self.head)

    def paths_of(self, part: Part) -> tuple[str, ...]:
        """Return the paths of a part, which are all of a tower's, whatever stage holds them."""
        match part:
            case "vision":
                return (*self.vision_embedding, *self.vision_layers, *self.behind)
            case "projector":
                return self.projector[len(self.behind) : -1]
            case "language":
                return (self.projector[-1], *self.language_layers, *self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A Hugging Face model on the meta device, with its chain and its family."""

    model: PreTrainedModel
    chain: Chain
    family: Family
    tied: dict[str, str]
    """Second name -> name of parameters that are one: the output projection tied to the word embedding."""

    def modules(self, paths: Iterable[str]) -> list[nn.Module]:
        """Return the modules at these paths."""
        return [self.model.get_submodule(path) for path in paths]


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the model's configuration, in which `tie_word_embeddings` is what its weights show.

    Raise ModelError for a folder without one, for a hub that does not answer, and for files that cost too much to read
    or build or that transformers refuses.
    """
    return load_with_note(path, trust_remote_code=trust_remote_code)[0]


def load_with_note(path: str, *, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str | None]:
    """Return the model's configuration, and what a user should know of its `tie_word_embeddings`, if anything.

    Raise ModelError like `load_config`.
    """
    check_place(path)
    is_folder = Path(path).is_dir()
    remedy = _CORRECT if is_folder else hub.remedy(path)
    with refusing(f"cannot read the configuration of model {path}", remedy):
        if is_folder:
            check_folder(Path(path))
        file = Path(path, CONFIG) if is_folder else Path(str(cached_file(path, CONFIG)))
        # Before transformers reads them: with some wrong values it would fill the memory.
        settings = check_settings(file)
        check_form(settings)
        check_code(settings)
        check_quantized(settings)
        config: PretrainedConfig
        if is_folder and not trust_remote_code:  # transformers takes most of the time of many callers
            config = copy.deepcopy(_read_config(path, file.read_bytes()))
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            _forget_attention(config)
        return config, separate_head(config, settings, file.parent)


@lru_cache(maxsize=4)
def _read_config(path: str, _content: bytes) -> PretrainedConfig:
    """Return the configuration of a model folder; it is read again when its file has other content."""
    config: PretrainedConfig = AutoConfig.from_pretrained(path)
    _forget_attention(config)
    return config


def _forget_attention(config: PretrainedConfig) -> None:
    """Forget which kernel of attention is named, of whose packages none is used: stages choose one."""
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(section, PretrainedConfig) and section._attn_implementation not in (None, *_KERNELS):
            section._attn_implementation_internal = None


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> Skeleton:
    """Build the model of `config` on the meta device, without memory or weights.

    Raise ModelError for an unknown architecture, for one that transformers cannot build, for more parameters than any
    machine holds, where transformers keeps some in another type than `dtype`, or when a parameter belongs to no part of
    the chain.
    """
    family = load_family(config)
    with refusing(f"a model of type {config.model_type!r} cannot be built", f"{_CORRECT}{_without_value(config)}"):
        family.check(config)
        check_language(config)
        check_experts(config)
        check_dropout(config)
        with torch.device("meta"):
            # A copy, because the attention is set in the model's configuration.
            model = family.AUTO_MODEL.from_config(copy.deepcopy(config), dtype=dtype)
        model.config.get_text_config()._attn_implementation = PACKED_ATTENTION
        _check_modules(model)
        check_output_head(model)
        embed_by_matrix(model)
        chain = _find_chain(model, family)
    claimed = {name for path in (*chain.parts, *chain.unused) for name, _ in parameters_at(model, path)}
    # A parameter that no stage holds would never train, and no checkpoint would have it.
    unclaimed = {name for name, _ in model.named_parameters(remove_duplicate=False)} - claimed
    if unclaimed:
        raise ModelError(
            f"{len(unclaimed)} parameters belong to no layer of the chain, first {min(unclaimed)}; {LIKE_LLAMA}"
        )
    check_kept_types(model, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > _MOST_PARAMETERS:
        raise ModelError(
            f"the model would have {parameters} parameters, more than the {_MOST_PARAMETERS} that are taken; {_CORRECT}"
        )
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tied = {f"{chain.head[-1]}.weight": f"{chain.projector[-1]}.weight"} if is_tied else {}
    return Skeleton(model=model, chain=chain, family=family, tied=tied)


def count_parameters(model: nn.Module, paths: Iterable[str]) -> int:
    """Return the number of parameters under some paths of a model."""
    return sum(parameter.numel() for path in paths for _, parameter in parameters_at(model, path))


def _without_value(config: PretrainedConfig) -> str:
    """Return which settings of the language model a wrong configuration may lack, to be shown behind a remedy."""
    lacking = [
        name for name, value in config.get_text_config().to_dict().items() if value is None and _SIZES.search(name)
    ]
    return (
        f" ({', '.join(lacking)} of the language model {'have' if lacking[1:] else 'has'} no value)" if lacking else ""
    )


def _check_modules(model: PreTrainedModel) -> None:
    """Raise ModelError for language layers that cannot be in stages, as their modules show."""
    if (why := of_language(model) or of_ends(model)) is not None:
        name = model.config.get_text_config().model_type
        raise ModelError(f"the language model {name!r} is not supported: {why}; {LIKE_LLAMA}")


def _find_chain(model: PreTrainedModel, family: Family) -> Chain:
    """Find the paths. The language layers are found by their number and kind: their path differs between models."""
    text = model.config.get_text_config()
    path_of: dict[nn.Module | nn.Parameter | None, str] = {module: path for path, module in model.named_modules()}
    path_of |= {parameter: path for path, parameter in model.named_parameters()}
    embedding = path_of[model.get_input_embeddings()]
    language_root = embedding.rsplit(".", 1)[0]
    vision = family.vision_modules(model)
    behind = tuple(path_of[module] for module in vision.behind)
    return Chain(
        vision_embedding=tuple(path_of[module] for module in vision.embedding),
        vision_layers=tuple(path_of[module] for module in vision.layers),
        kept=vision.kept,
        added=vision.added,
        behind=behind,
        projector=(*behind, *(path_of[module] for module in vision.projector), embedding),
        language_layers=_layer_list(model, language_root, text.num_hidden_layers),
        head=(f"{language_root}.norm", path_of[model.get_output_embeddings()]),
        unused=tuple(path_of[module] for module in vision.unused),
        rotary=f"{language_root}.rotary_emb",
        buffers=tuple(
            path
            for path, module in model.named_modules()
            if any(True for _ in module.buffers(recurse=False)) and not any(True for _ in module.parameters())
        ),
    )


def _layer_list(model: nn.Module, root: str, count: int) -> tuple[str, ...]:
    """Return the paths of the one ModuleList of `count` modules of a class under `root`."""
    found = [
        f"{root}.{name}"
        for name, module in model.get_submodule(root).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and len({type(layer) for layer in module}) == 1
    ]
    if len(found) != 1:
        raise ModelError(
            f"expected one list of {count} language layers under {root}, found {len(found)}: {found}; {LIKE_LLAMA}"
        )
    return tuple(f"{found[0]}.{number}" for number in range(count))
