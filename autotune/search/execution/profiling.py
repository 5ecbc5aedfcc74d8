"""The layer costs of a job's model on these devices: from the store, or profiled now and stored."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from autotune.dimensions.usual import zero_stages
from autotune.errors import ProfileError, TrialsKeepFailing
from autotune.events import Listener, Note, Phase, PhaseBegan, unheard
from autotune.machine.conditions import MachineWatch, Watch, disturbance
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.fit.profiled_sizes import beyond_profile, largest_sizes, serving_both, whole_images
from autotune.search.execution.failures import with_remedy
from autotune.workload import Prepared
from storage.store import Store
from trials import wire
from trials.costs.layer import NOISE_LIMIT
from trials.costs.layer_costs import LayerCosts
from trials.costs.profiled_sizes import ProfiledSizes
from trials.errors import WireError
from trials.plan import Layout, Padded, Plan, ZeroStage
from trials.run.pool import Answers, Pool
from trials.stage import Stage
from trials.tasks.answer import ProfileReport
from trials.tasks.request import ProbeSizes, Profile
from trials.workload import DataProfile, Hardware, ModelShape, Software, Workload

_log = logging.getLogger(__name__)
# A choice: the least odd number with which a median leaves out two disturbed rounds.
_REPEATS = 5
_CURVE_SIZES = 16
"""Sizes, in equal steps up to the largest, at which times that are not linear in the size are measured."""
_EXCHANGE_SECONDS, _EXCHANGE_SHARE = 90.0, 0.3
"""Longest time for all exchanges between ranks, and its largest share of the time in which the profile must end."""
_CURVE_SPREAD = 0.05
"""Median spread of the repeats above which they are not: noise would hide them."""


def layer_costs(
    prepared: Prepared, store: Store, pool: Pool, logs: Path, listener: Listener = unheard, *, fresh: bool = False
) -> LayerCosts:
    """Return the stored costs of this model on this hardware and software, or profile the layers and store the costs.

    They are profiled when `fresh`, and when there is no stored profile, one of another version, or one of data with
    other sizes, whose sizes the new one has as well where one profile can. Raise what `profile_layers` raises.
    """
    work = prepared.workload
    stored = None if fresh else stored_costs(work, store)
    if stored is not None:
        why = beyond_profile(stored.sizes, work.data, work.model)
        if why is None:
            _warn_of_conditions(stored)
            return stored
        listener(Note(text=f"The layers are profiled again: {why}"))
    layers = "compiled layers" if prepared.job.training.compile else "layers"
    listener(PhaseBegan(phase=Phase.PROFILE, text=f"Profiling the {layers} on {work.hardware}"))
    costs = profile_layers(prepared, pool, logs, also=None if stored is None else stored.sizes)
    store.save_layer_profile(*_keys(work), wire.encode(costs))
    return costs


def stored_costs(work: Workload, store: Store) -> LayerCosts | None:
    """Return the stored costs of this model on this hardware and software; None for none, or another version's."""
    stored = store.layer_profile(*_keys(work))
    try:
        return None if stored is None else wire.decode(LayerCosts, stored.document)
    except WireError as error:
        _log.info("the stored profile is of another version and is measured again: %s", error)
        return None


def _keys(work: Workload) -> tuple[str, str, Software]:
    return work.hardware.fingerprint, work.model.fingerprint, work.software


def profile_layers(
    prepared: Prepared,
    pool: Pool,
    logs: Path,
    watch: Callable[[Hardware], Watch] = MachineWatch,
    *,
    also: ProfiledSizes | None = None,
) -> LayerCosts:
    """Time the layers on all devices of the job at once, for its data and where that can be for sizes of others.

    Raise TrialsKeepFailing, with where the ranks' logs are, when a rank fails, and ProfileError for measurements that
    cannot be right. Times that stay noisy are marked in the costs, and logged as a warning, as is what disturbed the
    machine meanwhile.
    """
    data, model, hardware = prepared.workload.data, prepared.workload.model, prepared.workload.hardware
    devices = hardware.devices
    largest = largest_sizes(data, model)
    if also is not None:
        largest = serving_both(largest, also)
    timeout = prepared.job.search.trial_timeout
    # Each rank times every kind of layer, so any plan of the devices serves.
    whole = Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=1, data=devices, zero=0),
        stages=(Stage(vision=model.vision_layers, language=model.language_layers),),
    )
    try:
        task = design(data, model, zero_stages(model, devices), hardware.of_node, timeout, largest=largest)
        with watch(hardware) as watched:
            answer = pool.ask(prepared.request(whole, task), timeout)
    except WireError as error:  # a time that is no number has no JSON
        raise ProfileError(
            f"the measured layer costs cannot be used: {error}; profile again on an idle machine"
        ) from error
    if not isinstance(answer, Answers):
        raise TrialsKeepFailing(f"the layers could not be profiled: {with_remedy(answer)}; logs are in {logs}")
    reports = [report for report in answer.reports if isinstance(report, ProfileReport)]
    costs = replace(
        fit_costs(reports, hardware.nodes),
        sizes=largest,
        shortened=reports[0].shortened,
        disturbance=disturbance(watched.conditions, hardware),
    )
    _warn_of_conditions(costs)
    if costs.noisy_kinds:
        _log.warning(
            "the times of these layers differ by more than %.0f%% between repeats, after three rounds: %s; predictions "
            "are less certain until trials correct them; `autotune profile JOB --fresh` measures again",
            NOISE_LIMIT * 100,
            ", ".join(f"{kind} ({costs[kind].noise:.0%})" for kind in costs.noisy_kinds),
        )
    return costs


def _warn_of_conditions(costs: LayerCosts) -> None:
    """Warn of what made the profile shorter or less certain, each time that it is taken."""
    if costs.shortened:
        _log.warning(
            "the links between the ranks are slow, so the profile timed smaller exchanges than usual: %s; predictions "
            "continue their times in proportion to the size, and are less certain until trials correct them",
            ", ".join(f"{what} ({f'1/{1 / share:.0f}' if share else 'computed'})" for what, share in costs.shortened),
        )
    if costs.disturbance:
        _log.warning(
            "while the layers were timed, %s; predictions are less certain until trials correct them; "
            "`autotune profile JOB --fresh` measures again",
            costs.disturbance,
        )


def design(
    data: DataProfile,
    model: ModelShape,
    zero: tuple[ZeroStage, ...],
    of_node: int,
    timeout_seconds: float,
    *,
    largest: ProfiledSizes | None = None,
) -> Profile:
    """Return sizes that span the packs of this data, and separate the costs of units, tokens and squares.

    They go up to `largest`, where it is given.

    Units grow by equal factors, and are 0 for a model without a vision side. Some packs hold one sample, others many
    short ones: of four short samples' tokens, one sample has four times the sum of squared lengths. For the curves,
    units grow by equal steps, and packs of mean samples have tokens that do. Above the usual image, units are those of
    several such images. Exchanges of ranks have a part of the timeout, so that slow links cannot make the profile
    exceed it.
    """
    largest = largest or largest_sizes(data, model)
    units, of_image, tokens = largest.units, largest.image_units, largest.tokens
    short = max(1, tokens // 16)
    mean = data.text_tokens / data.samples
    shares = [(step + 1) / _CURVE_SIZES for step in range(_CURVE_SIZES)]
    packs = [(max(1, round(share * tokens / mean)), share * tokens) for share in shares]

    def unit_counts(counts: Iterable[float]) -> tuple[int, ...]:
        whole = (math.ceil(count) if count <= of_image else whole_images(count, of_image) for count in counts)
        return tuple(sorted(set(whole)))

    return Profile(
        sizes=ProbeSizes(
            unit_counts=unit_counts(round(units ** (step / 5)) for step in range(6))
            if model.vision_layers
            else (0,) * 6,
            sample_shapes=((1, short), (1, 4 * short), (4, short), (1, 10 * short), (8, short), (16, short)),
            image_units=of_image,
        ),
        curve_sizes=ProbeSizes(
            unit_counts=unit_counts(share * units for share in shares) if model.vision_layers else (),
            sample_shapes=tuple((samples, max(1, round(held / samples))) for samples, held in packs),
            image_units=of_image,
        ),
        curve_spread=_CURVE_SPREAD,
        zero_stages=zero,
        exchange_seconds=min(_EXCHANGE_SECONDS, _EXCHANGE_SHARE * timeout_seconds),
        repeats=_REPEATS,
        of_node=of_node,
    )
