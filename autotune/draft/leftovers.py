"""Notes on the arguments of a trainer that a job does not take over."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from autotune.draft.given import Given
from autotune.draft.video_settings import ARGUMENTS as VIDEO_ARGUMENTS
from autotune.draft.video_settings import video_note

_SEARCHED = {
    "deepspeed",
    "gradient_checkpointing",
    "disable_gradient_checkpointing",
    "grad_checkpoint",
    "vit_gradient_checkpointing",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "packing",
    "packing_length",
    "neat_packing",
    "padding_free",
    "data_flatten",
    "data_packing",
    "sample_packing",
    "eval_sample_packing",
    "pad_to_sequence_len",
    "batch_flattening",
    "group_by_length",
    "group_by_modality_length",
    "group_by_modality_length_auto",
    "zero_optimization",
    "fsdp",
    "fsdp_config",
    "activation_offloading",
    "use_packed_ds",
    "max_packed_tokens",
    "num_images_expected",
    "micro_batch_size",
    "tensor_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "sequence_parallel_size",
    "sequence_parallel_degree",
    "deepspeed_autotp_size",
}
"""Arguments that the search for a plan decides."""
_IMAGES = {
    "conv_style",
    "ENV",
    "model_kwargs",
    "template",
    "chat_template",
    "chat_template_jinja",
    "default_system_message",
    "special_tokens",
    "image_size",
    "image_resize_algorithm",
    "prompt_template",
    "version",
    "system",
    "force_image_size",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "dynamic_image_size",
    "use_thumbnail",
    "pad2square",
    "down_sample_ratio",
    "vision_select_layer",
    "mm_vision_select_layer",
    "image_aspect_ratio",
    "image_grid_pinpoints",
    "mm_patch_merge_type",
    "max_slice_nums",
    "scale_resolution",
    "frames_upbound",
    "min_num_frame",
    "max_num_frame",
    "max_num",
    "input_size",
    "video_segments",
    *VIDEO_ARGUMENTS,
    *(f"{kind}{end}_pixels" for kind in ("", "image_", "video_") for end in ("max", "min")),
    *(f"{kind}_resized_{side}" for kind in ("image", "video") for side in ("height", "width")),
    "video_total_pixels",
    *("max_num_frames", "image_factor", "frame_factor", "spatial_merge_size", "max_ratio"),
    *("video_max_num", "video_max_slice_nums", "max_partition", "hd_num", "num_crops", "qwenvl_bbox_format"),
    *(f"{kind}_{end}_token_num" for kind in ("image", "video") for end in ("max", "min")),
}
"""Arguments about what the files of the model folder say: its images and its prompts."""
_PARTS = {"vision_tower", "vision_path", "llm_path", "mlp_path", "pretrain_mm_mlp_adapter"}
"""Arguments that name a part of the model."""
_LEARNING = {
    "optim",
    "optimizer",
    "optimizer.params",
    "scheduler.params",
    "adam_epsilon",
    "average_tokens_across_devices",
    "max_samples",
    "max_epochs",
    "mix_strategy",
    "interleave_probs",
    "interleave_prob",
    "dataset_shuffle",
    "train_dataloader_shuffle",
    "disable_shuffling",
    "train_mm_proj_only",
    "enable_dft_loss",
    "enable_thinking",
    "bits",
    "quantization_bit",
    "quant_bits",
    "load_in_4bit",
    "load_in_8bit",
    "drop_path_rate",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "mask_history",
    "train_on_prompt",
    "train_on_inputs",
    "assistant_only_loss",
    "loss_scale",
    "lora_bias",
    "lora_namespan_exclude",
    "lora_weight_path",
    "num_lora_modules",
    "use_dora",
    "use_rslora",
    "pissa_init",
    "init_weights",
    "loraplus_lr_ratio",
    "lorap_lr_ratio",
    "use_galore",
    "use_badam",
    "use_apollo",
    "additional_target",
    "modules_to_save",
    "use_backbone_lora",
    "vision_lora",
    "unfreeze_vit_layers",
    "unfreeze_topk_llm",
    "unfreeze_topk_vision",
    "unfreeze_lm_head",
    "freeze_parameters",
    "freeze_parameters_regex",
    "freeze_parameters_ratio",
    "trainable_parameters",
    "trainable_parameters_regex",
    "completion_only_loss",
    "max_length",
    "truncation_strategy",
    "min_lr",
    "lr_scheduler_kwargs",
    "resize_vocab",
    "new_special_tokens",
    "adapter_name_or_path",
    "resume_from_checkpoint",
    "external_plugins",
    "curriculum_learning",
    "curriculum_sampling",
    "sequence_len",
    "unfrozen_parameters",
    "relora",
    "lr_groups",
    "embedding_lr",
    "embedding_lr_scale",
    "cosine_min_lr_ratio",
    "lora_target_parameters",
    "lora_rank_pattern",
    "lora_alpha_pattern",
    "peft_layers_to_transform",
    *(
        f"datasets.{name}"
        for name in ("type", "split", "roles", "roles_to_train", "train_on_eos", "drop_system_message")
    ),
    *(f"datasets.{name}" for name in ("field_messages", "message_property_mappings", "message_field_training")),
}
"""Arguments about what is learnt that a job does not have."""
KNOWN = _SEARCHED | _IMAGES | _PARTS | _LEARNING
_ADAMW = ("adamw", "adam")
_ON, _ABSENT = ("true", "1", "yes"), ("none", "null", "")
_OFF = ("false", "no", "0", "[]", "{}", *_ABSENT)
_USUAL = {
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "average_tokens_across_devices"), _ON),
    **dict.fromkeys(("dataset_shuffle", "train_dataloader_shuffle"), _ON),
    **dict.fromkeys(("bits", "quantization_bit", "quant_bits"), (*_OFF, "16")),
    **dict.fromkeys(("num_lora_modules", "max_length", "max_samples"), (*_OFF, "-1")),
    "adam_epsilon": (*_ABSENT, "1e-08"),
    "enable_thinking": _ABSENT,
    "init_weights": (*_ABSENT, *_ON),
    "loss_scale": (*_ABSENT, "default"),
    "mix_strategy": (*_ABSENT, "concat"),
    "truncation_strategy": (*_ABSENT, "delete"),
    "optimizer.params.eps": (*_ABSENT, "1e-08", "auto"),
    "optimizer.params.adam_w_mode": _ON,
    "optimizer.params.bias_correction": _ON,
    "optimizer.params.torch_adam": (*_OFF, *_ON),
    "scheduler.params.warmup_min_lr": (*_OFF, "auto"),
    "scheduler.params.warmup_type": ("linear",),
    "scheduler.params.cos_min_ratio": (*_OFF, "0.0001"),
}
"""Values with which an argument changes nothing, where they are others than those that turn it off."""


def notes_on(given: Given, stated: Collection[str]) -> Iterator[str]:
    """Yield the notes, those on what changes the training with their values.

    `stated` has the names of the arguments that the user gave; others have the trainer's defaults.
    """
    if given.unknown:
        yield f"Not known, since the script does not set them: {', '.join(sorted(given.unknown))}"
    if given.automatic:
        names = ", ".join(sorted(given.automatic))
        yield f"`auto`, so decided by a script or a model that was not read; check them in the job: {names}"
    left = {name: value for name, value in given.left.items() if name not in given.unknown}
    if parts := _written(left, _PARTS, left):
        yield f"model.path has to be a whole model; the job does not join the parts of one: {parts}"
    note, of_videos = video_note(left, stated)
    if note:
        yield note
    if images := _written(left, _IMAGES - of_videos, stated):
        yield (
            "Here the files of the model folder decide on images and prompts; change these there, if they have such a "
            f"setting: {images}"
        )
    if learning := learning_text(left):
        yield f"The job has nothing for these, so the training differs: {learning}"
    if searched := sorted(_SEARCHED & left.keys()):
        yield f"Left to the search for a plan: {', '.join(searched)}"
    if rest := sorted(name for name in left if _general(name) not in KNOWN):
        yield f"Not taken over: {', '.join(rest)}"


def learning_text(values: Mapping[str, Any]) -> str:
    """Return the arguments about what is learnt that a job does not have, with their values; empty without any."""
    return _written({name: value for name, value in values.items() if not _is_usual(name, value)}, _LEARNING, values)


def _written(values: Mapping[str, Any], names: set[str], stated: Collection[str]) -> str:
    return ", ".join(
        f"{name}: {values[name]!s:.60}{'' if name in stated else ' (default there)'}"
        for name in sorted(values)
        if _general(name) in names
    )


def _general(name: str) -> str:
    """Return the name of an argument without the position of its list's entry, or the name of a parameter."""
    return re.sub(r"\[\d+\]|(?<=\.params)\.\w+", "", name)


def _is_usual(name: str, value: object) -> bool:
    """Return whether the job needs nothing for this value."""
    text = str(value).lower()
    if name in ("optim", "optimizer"):
        return text.startswith(_ADAMW) and "mini" not in text and "bit" not in text
    with suppress(ValueError):  # of a word
        text = f"{float(text):g}"
    return text in _USUAL.get(name, _OFF)
