"""The search space of a workload: the values of each axis that devices, memory, data and job allow."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain

from autotune.dimensions.dimension import FurtherLayouts
from autotune.dimensions.folds import further_layouts, layout_name, named_layout, refused
from autotune.dimensions.usual import layouts, zero_stages
from autotune.errors import JobError, NoFeasiblePlan
from autotune.search.solver.limits import HEADROOM
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import layer_counts
from autotune.search.space.capacities import capacities, holds_all
from autotune.search.space.held import Holding
from autotune.search.space.ladders import offered_ladders
from autotune.search.space.offers import offered_layouts
from autotune.search.space.packings import ALONE, Ladders, ladder_name
from autotune.search.space.space import Axes, Space, packings_of
from autotune.search.space.splitting import Recompute
from trials import plugins
from trials.data.packers import PACKERS
from trials.errors import UnknownName
from trials.job import SpaceSection, TrainingSection
from trials.plan import SIMPLE_PACKER, Layout, Levelled, Packed, Packing, Padded, Plan
from trials.stage import TOWERS
from trials.units import number_of
from trials.workload import Workload

_MEBI = 1 << 20
EVERYTHING = SpaceSection()
_TOLERANCE = TrainingSection().batch_tolerance


def feasible_space(
    workload: Workload,
    solver: Solver,
    *,
    remedy: str,
    wanted: SpaceSection = EVERYTHING,
    held: Holding | None = None,
    batch_tolerance: float = _TOLERANCE,
    show: Callable[[str], object] = lambda _: None,
) -> Space:
    """Return the space within `wanted`; `show` why levels of packs and further layouts are searched, or are not.

    With `held` it has the plans alone that a trainer can hold.

    Raise JobError for an impossible value, and NoFeasiblePlan, whose message ends with `remedy` and names the
    `batch_tolerance` of the solver's epochs, when no plan of the space fits the memory and keeps the global batch.
    """
    _check_recompute(workload, wanted)
    chosen = [solver.overlapped(layout) for layout in _layouts(workload, wanted)]
    _check_timed(chosen, solver)
    chosen = chosen if held is None else [*held.abilities.layouts(chosen)]
    several = _further(workload, solver, wanted, held)
    fitting = _fitting(workload, solver, chosen)
    every = [*chosen, *chain.from_iterable(further.possible for further in several)]
    axes, allowed = _axes(workload, wanted, fitting, held), partial(allows, wanted)
    batch = (
        f"the global batch of {number_of(workload.global_batch_samples, 'sample')} within {100 * batch_tolerance:g} % "
        "(training.batch_tolerance)"
    )
    refusal = partial(_nothing_fits, workload, solver, replace(axes, layouts=tuple(every)), remedy, held, batch=batch)
    if not fitting and len(every) == len(chosen):
        raise NoFeasiblePlan(refusal())
    usual = tuple(packings_of(axes).usual())
    if held is None:
        axes = replace(axes, ladders=_ladders(axes, workload, solver, wanted, show))
    space = Space(axes, solver, allowed) if fitting else None
    searched = [*fitting]
    for further in several:
        found = offered_layouts(further, solver, usual, space.fastest_seconds() if space else math.inf)
        if found.reason:
            show(found.reason)
        searched += found.layouts
        if found.layouts and space:
            space = space.widened(found.layouts, solver)
        elif found.layouts:
            space = Space(replace(axes, layouts=found.layouts), solver, allowed)
    if space is None or space.is_empty:
        # Layouts were offered for the usual packs alone; with smaller ones any is better than no plan.
        rest = _fitting(workload, solver, [layout for layout in every if layout not in searched])
        searched += rest
        axes = replace(axes, layouts=tuple(searched))
        space = Space(axes, solver, allowed) if rest else space
        if space is None or space.is_empty:
            raise NoFeasiblePlan(refusal())
        show(f"{_names(rest)} are searched too: no plan with other layouts fits the memory")
    if spread := [layout for layout in searched if solver.extrapolates(layout)]:
        show(
            f"Averages of gradients with {_names(spread)} pass between nodes as none in the profile do: their time is "
            "computed from that of all ranks"
        )
    return space


def _axes(workload: Workload, wanted: SpaceSection, fitting: tuple[Layout, ...], held: Holding | None) -> Axes:
    """Return the axes of these layouts, without ladders of levels."""
    axes = Axes(
        layouts=fitting,
        packers=_packers(wanted),
        capacities=_capacities(workload, wanted),
        # No pack is full of units where no sample has any, and with a slack every pack would count as full.
        qv_slacks=wanted.qv_slack if workload.data.most_vision_units else wanted.qv_slack[:1],
        qt_slacks=wanted.qt_slack,
        boundaries=tuple(accumulate(wanted.split)) if wanted.split else None,
        recompute=wanted.recompute,
        boundary_shift=wanted.boundary_shift,
        recompute_shift=wanted.recompute_shift,
    )
    if held is None:
        return axes
    has_capacities = wanted.qv is not None or wanted.qt is not None
    return held.within(axes, has_packs=bool(_of_packs(wanted)), has_capacities=has_capacities)


def _ladders(
    axes: Axes, workload: Workload, solver: Solver, wanted: SpaceSection, show: Callable[[str], object]
) -> Ladders | None:
    alone = [layout for layout in axes.layouts if layout.tensor == 1]
    offer = offered_ladders(workload, solver, alone, tuple(packings_of(axes).usual()), wanted.sequence)
    if offer.reason:
        show(offer.reason)
    return offer.ladders


def _layouts(workload: Workload, wanted: SpaceSection) -> list[Layout]:
    model, devices = workload.model, workload.hardware.devices
    layers = model.vision_layers + model.language_layers
    possible = {layout_name(layout): layout for layout in layouts(model, devices)}
    names = possible if wanted.layouts is None else wanted.layouts
    possible |= {name: layout for name in names if (layout := named_layout(name, workload)) is not None}
    if unknown := [name for name in names if name not in possible]:
        raise JobError(
            f"search.space.layouts: {unknown[0]!r} is not a layout of {number_of(devices, 'device')} and a model of "
            f"{layers} layers in {model.dtype}: {', '.join(possible)}; docs/job-file.md lists further codes"
        )
    chosen = [possible[name] for name in names]
    if wanted.split is None:
        return chosen
    if sum(wanted.split) != layers:
        raise JobError(
            f"search.space.split: the stages hold {number_of(sum(wanted.split), 'layer')} but the model has {layers}"
        )
    found = [layout for layout in chosen if layout.pipeline == len(wanted.split)]
    if not found:
        raise JobError(
            f"search.space.split: it has {number_of(len(wanted.split), 'stage')}, but no layout has: {_names(chosen)}; "
            "give a split for one of them, or another number of devices"
        )
    return found


def check_space(workload: Workload, wanted: SpaceSection) -> None:
    """Raise JobError for an impossible value, as far as that is known without costs of layers."""
    _check_recompute(workload, wanted)
    _layouts(workload, wanted)
    _packers(wanted)
    _capacities(workload, wanted)


def allows(wanted: SpaceSection, plan: Plan) -> bool:
    """Return whether a plan has the values that the job fixes; other values are free."""
    asked, packing = _of_packs(wanted), plan.packing
    everything = [(stage.vision, stage.language) for stage in plan.stages]
    return (
        (wanted.layouts is None or layout_name(plan.layout) in wanted.layouts)
        and (wanted.sequence is None or ladder_name(packing.degrees) in wanted.sequence)
        and (not asked or (isinstance(packing, Packed | Levelled) and _has_packs(packing, asked)))
        and (wanted.split is None or tuple(map(sum, everything)) == wanted.split)
        and all(_recomputes(plan, level, wanted.recompute) for level in range(len(packing.degrees)))
    )


def _of_packs(wanted: SpaceSection) -> dict[str, Sequence[str | int]]:
    """Return the values that the job fixes of packs, by name; one that is written as its default is not fixed."""
    names = ("packers", "qv", "qt", "qv_slack", "qt_slack")
    return {name: values for name in names if (values := getattr(wanted, name)) != getattr(EVERYTHING, name)}


def _has_packs(packing: Packed | Levelled, asked: Mapping[str, Sequence[str | int]]) -> bool:
    """Return whether the capacities of the last level, and packers and slacks of all, are among those asked for."""

    def has(level: Packed, name: str) -> bool:
        match name:
            case "packers":
                return level.packer in asked[name]
            case "qv_slack":
                slack, most = level.qv - level.qv_min, level.qv
            case "qt_slack":
                slack, most = level.qt - level.qt_min, level.qt
            case _:
                return level is not packing.levels[-1] or getattr(level, name) in asked[name]
        return slack in [min(int(each), most) for each in asked[name]]  # one above the capacity leaves nothing

    return all(has(level, name) for name in asked for level in packing.levels)


def _recomputes(plan: Plan, level: int, wanted: Recompute) -> bool:
    """Return whether the stages recompute as many layers as is wanted, for packs of a level."""
    if wanted == "fit":
        return True
    of_level = [stage.recomputed[level] for stage in plan.stages]
    if any(each.selective(tower) for each in of_level for tower in TOWERS):
        return False
    recomputed = [(each.vision, each.language) for each in of_level]
    if wanted == "all":
        return recomputed == [(stage.vision, stage.language) for stage in plan.stages]
    return recomputed == ([(0, 0)] * len(recomputed) if wanted == "none" else [*wanted])


def _check_recompute(workload: Workload, wanted: SpaceSection) -> None:
    """Raise JobError for recompute counts that do not match the given split."""
    if isinstance(wanted.recompute, str):
        return
    if wanted.split is None or len(wanted.split) != len(wanted.recompute):
        raise JobError(
            f"search.space.recompute: it has counts for {number_of(len(wanted.recompute), 'stage')} but split has "
            f"{len(wanted.split or ())}; give as many, or one of fit, all and none"
        )
    held = layer_counts(tuple(accumulate(wanted.split)), workload.model.vision_layers)
    for number, ((vision, language), recomputed) in enumerate(zip(held, wanted.recompute, strict=True)):
        if recomputed[0] > vision or recomputed[1] > language:
            raise JobError(
                f"search.space.recompute: stage {number} recomputes {recomputed[0]} vision and {recomputed[1]} "
                f"language layers but holds {vision} and {language}; lower the counts"
            )


def _further(workload: Workload, solver: Solver, wanted: SpaceSection, held: Holding | None) -> list[FurtherLayouts]:
    """Return the layouts that may be searched in addition to the usual ones; none where the job names layouts."""
    if wanted.layouts is not None or (wanted.sequence is not None and ladder_name(ALONE) not in wanted.sequence):
        return []
    stages = None if wanted.split is None else len(wanted.split)
    able = tuple if held is None else held.abilities.layouts
    return [
        replace(kind, possible=able(each for each in kind.possible if stages in (None, each.pipeline)))
        for kind in further_layouts(workload, solver)
    ]


def _check_timed(chosen: Iterable[Layout], solver: Solver) -> None:
    """Raise JobError for a named layout whose exchanges the profile has not timed."""
    for layout in chosen:
        if missing := solver.unprofiled(layout):
            raise refused(
                layout_name(layout),
                f"the profile has no times of {missing}; measure them with `autotune profile JOB --fresh`",
            )


def _fitting(workload: Workload, solver: Solver, chosen: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts whose leanest plan is expected to fit."""
    usable = HEADROOM * workload.memory_limit_bytes
    return tuple(layout for layout in chosen if _least(workload, solver, layout)[0] <= usable)


def leanest(workload: Workload, solver: Solver, wanted: SpaceSection = EVERYTHING) -> tuple[Layout, int] | None:
    """Return the layout with the leanest plan for the longest sample alone, and the limit in bytes that it needs.

    None if the ranks of every layout exchange what the solver's costs have no times of.
    """
    further = chain.from_iterable(kind.possible for kind in _further(workload, solver, wanted, None))
    timed = [layout for layout in (*_layouts(workload, wanted), *further) if solver.unprofiled(layout) is None]
    if not timed:
        return None
    tightest = replace(workload, memory_limit_bytes=0)  # so that ranks share the sample wherever that needs less
    needed = {layout: _least(tightest, solver, layout)[0] for layout in timed}
    layout = min(needed, key=needed.__getitem__)
    return layout, math.ceil(needed[layout] / HEADROOM)


def _least(workload: Workload, solver: Solver, layout: Layout) -> tuple[float, int]:
    """Return (bytes, stage) that the longest sample needs at least, alone or shared by as many ranks as possible."""
    alone = solver.fullest(solver.leanest(Padded(samples=1), layout))
    degrees = [degree for degree in solver.sequence_degrees if layout.data % degree == 0 and layout.tensor == 1]
    if alone[0] <= HEADROOM * workload.memory_limit_bytes or not degrees:
        return alone
    qv, qt = workload.data.most_vision_units, workload.data.longest_text_tokens
    # The largest degree leaves each rank the least of the sample.
    shared = Packed(qv=qv, qt=qt, qv_min=0, qt_min=0, packer=SIMPLE_PACKER, sequence=degrees[-1])
    return min(alone, solver.fullest(solver.leanest(shared, layout)))


def _packers(wanted: SpaceSection) -> tuple[str, ...]:
    for name in wanted.packers or ():
        try:
            plugins.load(PACKERS, name)
        except UnknownName as error:
            raise JobError(f"search.space.packers: {error}") from error
    return wanted.packers or plugins.names(PACKERS)


def _capacities(workload: Workload, wanted: SpaceSection) -> tuple[tuple[int, int], ...]:
    """Return the pairs that the data fills; a capacity that is fixed is combined with each value of the other."""
    found = capacities(workload.data, workload.global_batch_samples, hold_all=holds_all(workload))
    pairs = [(pair.qv, pair.qt) for pair in found]
    if wanted.qv is None and wanted.qt is None:
        return tuple(pairs)
    qvs, qts = wanted.qv or sorted({qv for qv, _ in pairs}), wanted.qt or sorted({qt for _, qt in pairs})
    least = _longest(workload) if holds_all(workload) else (0, 0)
    given = tuple((qv, qt) for qv in qvs for qt in qts if qv >= least[0] and qt >= least[1])
    if not given:
        raise JobError(
            f"search.space: with data.oversize: {workload.oversize} a pack has to hold the longest sample, of "
            f"{least[0]} vision units and {least[1]} text tokens; raise qv and qt, or set data.oversize: own-pack"
        )
    return given


def _longest(workload: Workload) -> tuple[int, int]:
    return workload.data.most_vision_units, workload.data.longest_text_tokens


def _nothing_fits(
    workload: Workload, solver: Solver, axes: Axes, remedy: str, held: Holding | None, *, batch: str
) -> str:
    """Return why no plan of these axes fits the memory and keeps `batch`, with the least memory that a plan needs."""
    if held is not None:
        return (
            f"no plan of the search space that {held.target.title} can hold fits "
            f"{workload.memory_limit_bytes // _MEBI} MiB per rank and keeps {batch}; {remedy}, widen "
            "search.space, or search for no other trainer"
        )
    searched = (
        f"layouts {_names(axes.layouts)}, {number_of(len(axes.capacities), 'pair')} of capacities, recompute "
        f"{axes.recompute}"
    )
    miss = Space(axes, solver).nearest_miss()
    if miss is None:
        return (
            f"no plan of the search space keeps {batch}: {searched}; set training.global_batch_samples to what steps "
            "of whole packs can hold, raise the tolerance, or widen search.space.qv and qt"
        )
    packing, layout, needed, stage = miss
    limit = workload.memory_limit_bytes
    return (
        f"no plan that keeps {batch} fits {limit // _MEBI} MiB per rank: {searched}; the leanest, "
        f"{layout_name(layout)} with qv {packing.qv} and qt {packing.qt}, needs about {_mebi(needed)} MiB on stage "
        f"{stage}, {_mebi(needed) - limit // _MEBI} MiB more than available; {remedy}"
        f"{_or_devices(workload, solver, packing)}, or widen search.space"
    )


def _mebi(expected: float) -> int:
    """Return the least limit in MiB under which plans with these expected bytes are solved, rounded up."""
    return math.ceil(expected / HEADROOM / _MEBI)


def _or_devices(workload: Workload, solver: Solver, packing: Packing) -> str:
    """Return more devices as a further remedy, the fewest whose pipeline fits; an empty text where none does."""
    devices = 2 * workload.hardware.devices
    while devices <= solver.layers:
        pipeline = Layout(pipeline=devices, data=1, zero=zero_stages(workload.model, 1)[0])
        if solver.least_bytes(packing, pipeline) <= HEADROOM * workload.memory_limit_bytes:
            return f", or give {devices} devices"
        devices *= 2
    return ""


def _names(chosen: Iterable[Layout]) -> str:
    return ", ".join(map(layout_name, chosen))
