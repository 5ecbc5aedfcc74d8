"""Tokens that LLaMA-Factory's own template and mm_plugin make of a record. Source: its data and hparams of 0.9."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_WHOLE = 1 << 30
"""Tokens at which nothing is cut."""


def counter(request: dict[str, Any]) -> Callable[[dict[str, Any]], int]:
    """Return what counts a record of the exported data under the exported `settings`, whatever its length.

    `described` is the description of the data that the export writes, with an entry `train`.
    """
    hparams = import_module("llamafactory.hparams")
    settings = {**request["settings"], "model_name_or_path": request["model"], "cutoff_len": _WHOLE}
    parser = import_module("transformers").HfArgumentParser([hparams.ModelArguments, hparams.DataArguments])
    of_model, of_data = parser.parse_dict(settings, allow_extra_keys=True)
    loaded = import_module("llamafactory.model").load_tokenizer(of_model)
    template = import_module("llamafactory.data").get_template_and_fix_tokenizer(loaded["tokenizer"], of_data)
    supervised = import_module("llamafactory.data.processor.supervised").SupervisedDatasetProcessor(
        template=template, data_args=of_data, **loaded
    )
    (described,) = import_module("llamafactory.data.parser").get_dataset_list(["train"], request["described"])
    convert = import_module("llamafactory.data.converter").get_dataset_converter(
        described.formatting, described, of_data
    )

    def count(record: dict[str, Any]) -> int:
        made = supervised.preprocess_dataset({name: [value] for name, value in convert(record).items()})
        if not made:
            raise ValueError("it drops the sample, which has not a question for each answer")
        (ids,) = made["input_ids"]
        return len(ids)

    return count
