"""The encoder that a job's model and data need."""

from transformers import PretrainedConfig

from trials.data.records.sample import Encoder, Measurer
from trials.errors import ModelError
from trials.job import DataSection, ModelSection
from trials.model.family import find_family, load_family
from trials.model.inputs import chat
from trials.model.inputs.chat_encoder import ChatEncoder
from trials.model.inputs.video_limits import VideoLimits
from trials.model.refusals.refusal import refusing
from trials.model.skeleton import load_config


def load_encoder(model: ModelSection, data: DataSection) -> Encoder:
    """Return the encoder that a model is trained with. Raise ModelError for a model that cannot be trained here."""
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    family = load_family(config)
    what = f"the tokenizer or image processor of model {model.path} cannot be used"
    with refusing(what, "save both there with save_pretrained"):
        return family.encoder(model.path, model.trust_remote_code, token_limit(data, config))


def load_measurer(model: ModelSection, data: DataSection) -> Measurer:
    """Return the model's encoder where it can be trained here, else what measures with its own processor.

    Raise ModelError for a model whose processor cannot count an image's tokens.
    """
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    if find_family(config):
        return load_encoder(model, data)
    return chat.measurer(model.path, model.trust_remote_code, token_limit(data, config))


def video_limits(measurer: Measurer) -> VideoLimits | None:
    """Return what decides on the frames of video files; None where the model takes no videos."""
    measuring = measurer.measurer if isinstance(measurer, ChatEncoder) else measurer
    return measuring.videos.limits if isinstance(measuring, chat.ChatMeasurer) and measuring.videos else None


def token_limit(data: DataSection, config: PretrainedConfig) -> int | None:
    """Return the number of tokens that samples are cut to; None unless the job says `oversize: truncate`.

    Raise ModelError for a model that does not say how long its context is.
    """
    if data.oversize != "truncate":
        return None
    if data.max_tokens is not None:
        return data.max_tokens
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelError("the model's configuration has no max_position_embeddings; set data.max_tokens")
    return length
