"""Token ids and labels of the certified records, next to what the family's own processor makes of them."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from trials.certification import InputCount
from trials.data.index import DatasetIndex
from trials.data.records.sample import VIDEO, Encoder, Sample
from trials.errors import DataError
from trials.job import ModelSection
from trials.model.plain.differing import difference
from trials.model.plain.plain_inputs import Expected, PlainInputs
from trials.model.refusals.refusal import reason
from trials.model.skeleton import load_config

_log = logging.getLogger(__name__)


def compare_inputs(
    model: ModelSection, index: DatasetIndex, encoder: Encoder, rows: Sequence[int]
) -> tuple[InputCount, list[str]]:
    """Compare the readable records of `rows` of the index; return the count, and the first that differs.

    Images with options of their own are not compared, and of a record with videos only what it says besides.
    """
    plain = _plain_inputs(model)
    records = labelled = uncompared = 0
    faults: list[str] = []
    for row in rows:
        try:
            whole = index.sample(row)
            sample = _without_videos(whole)
            encoded = encoder.encode(sample, pixels=False, kept=index.sealed(row))
        except DataError:  # the ranks have logged it
            continue
        expected = _expected(plain, sample)
        if expected is None or whole.videos:
            uncompared += 1
        else:
            records += 1
            labelled += expected.is_target is not None
        if expected and (text := difference(encoded, expected, encoder.max_tokens)):
            faults.append(f"{index.where(row)}: {text}, by transformers' own processor and chat template")
    return InputCount(records=records, labelled=labelled, uncompared=uncompared), faults[:1]


def _without_videos(sample: Sample) -> Sample:
    """Return a sample as it would be without its videos, which transformers' processor takes from their files alone."""
    if not sample.videos:
        return sample
    turns = (replace(turn, text=turn.text.replace(VIDEO, "")) if turn.role == "user" else turn for turn in sample.turns)
    return replace(sample, turns=tuple(turns), videos=())


def _plain_inputs(model: ModelSection) -> PlainInputs | None:
    """Return the model's own processor, None where it cannot be made."""
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    try:
        return PlainInputs(model.path, config, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        _log.warning("token ids are not compared, since the model's own processor cannot be made: %s", reason(error))
        return None


def _expected(plain: PlainInputs | None, sample: Sample) -> Expected | None:
    """Return what the processor makes of a record, None where it cannot be asked."""
    if plain is None or any(sample.image_options):
        return None
    try:
        return plain.expected(sample)
    except Exception as error:  # templates and processors raise what they like
        _log.warning("the token ids of a record are not compared: %s", reason(error))
        return None
