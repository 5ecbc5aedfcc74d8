"""The output projection of a language model, whose logits are what the loss takes."""

from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError

_CAP = "final_logit_softcapping"
_FACTORS = ("logits_scaling", "logit_scale")


def check_output_head(model: PreTrainedModel) -> None:
    """Raise ModelError for logits that are not those of one linear layer, with or without a bias.

    Stages compute these of the rows with a label alone. A wide cap would change the results of a small copy by less
    than its tolerance.
    """
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"its head is a {type(head).__name__}, of which stages know nothing; use a model whose head is one linear "
            "layer"
        )
    if cap := getattr(text, _CAP, None):
        raise ModelError(f"its logits are capped ({_CAP} {cap:g}), which stages do not do; use a model without a cap")
    for name in _FACTORS:
        if (factor := getattr(text, name, None)) not in (None, 1):
            raise ModelError(
                f"its logits are scaled ({name} {factor:g}), which stages do not do; use a model without a scale"
            )
