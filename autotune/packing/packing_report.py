"""Result of `autotune pack INPUT`, as a table for people and as a document for programs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from autotune.epoch_balance import SampleSpread
from autotune.packing.balance import UNPACKED, Balanced, Side
from autotune.plan_text import packing_text
from autotune.results.text_table import table
from trials import wire
from trials.certification import Neutrality
from trials.units import number_of

# Choices: a screen shows the first five of a list, and the JSON document as many as a script needs to find the cause.
_SHOWN = 5
_SHOWN_IN_DOCUMENT = 1000
_RULES = {
    "own-pack": "each has a pack of its own",
    "truncate": "each has a pack of its own",
    "skip": "left out",
}
"""Handling of samples above the capacities; under `fail` there is no report. `truncate` cuts to the model's length."""

_Entry: TypeAlias = Callable[[Side], str]


def _count(value: int) -> str:
    return f"{value:,}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _ratio(found: Neutrality, trait: str) -> str:
    """Return the variance of a trait, in which the samples may be all alike where files are shown in part."""
    return f"{found.variances[trait]:.2f}" if trait in found.variances else "-"


def _spread(value: SampleSpread) -> str:
    return f"{value.mean:.1f} ({value.least} to {value.most})"


def _operations(value: float) -> str:
    prefix, scale = next(((name, size) for name, size in (("T", 1e12), ("G", 1e9)) if value >= size), ("M", 1e6))
    return f"{value / scale:.3g} {prefix}"


_ROWS: Sequence[tuple[str, str, _Entry]] = (
    ("samples", "", lambda side: _count(side.balance.samples)),
    ("micro-batches", "", lambda side: _count(side.balance.packs)),
    ("steps", "", lambda side: _count(side.balance.steps)),
    ("micro-batch", "samples: mean (range)", lambda side: _spread(side.balance.samples_per_pack)),
    ("step", "samples: mean (range)", lambda side: _spread(side.balance.samples_per_step)),
    ("steps near the global batch", "of steps", lambda side: _percent(side.balance.steps_near)),
    ("fill of Qv", "of vision units", lambda side: _percent(side.balance.vision_fill)),
    ("fill of Qt", "of text tokens", lambda side: _percent(side.balance.text_fill)),
    ("packs that are not full", "below Q'v and Q't", lambda side: _percent(side.balance.relaxation_missed)),
    ("pad ratio", "of text tokens", lambda side: _percent(side.balance.pad_ratio)),
    ("dist ratio, vision", "idle, by units", lambda side: _percent(side.balance.dist_ratio_vision)),
    ("dist ratio, language", "idle, by tokens", lambda side: _percent(side.balance.dist_ratio_language)),
    ("dist ratio, head", "idle, by targets", lambda side: _percent(side.balance.dist_ratio_targets)),
    ("attention balance ratio", "idle, by tokens^2", lambda side: _percent(side.balance.attention_balance_ratio)),
    ("cost efficiency, rows", "by FLOP of all passes", lambda side: _percent(side.balance.cost_efficiency)),
    ("cost efficiency, steps", "by FLOP of all passes", lambda side: _percent(side.balance.step_cost_efficiency)),
    ("mixing with the next epoch", "1 is a fresh shuffle", lambda side: f"{side.mixing:.3f}"),
    ("cost of a sample", "FLOP, with waiting", lambda side: _operations(side.sample_flops)),
)


def pack_text(found: Balanced) -> str:
    """Show the choices, the table before and after, over-size samples and bad lines."""
    material = found.material
    saved = 1 - found.after.sample_flops / found.before.sample_flops
    origin = material.found.origin(material.index)
    samples = f"{_count(round(float(material.index.repeats.sum())))} samples{origin}\n" if origin else ""
    header = (
        f"{material.path}: {found.after.balance.data_parallel} data ranks, global batch "
        f"{material.settings.global_batch_samples}, seed {material.settings.seed}, epoch {found.number}\n{samples}"
        f"Compared by forward FLOP of {material.cost_model} alone; memory and fixed costs are unknown here\n"
        f"Before: {packing_text(UNPACKED)}, in random order\n"
        f"After: {packing_text(found.packing)}: {found.reason}"
    )
    rows = [(name, unit, entry(found.before), entry(found.after)) for name, unit, entry in _ROWS]
    before, after = found.before.neutrality, found.after.neutrality
    rows += [
        (f"variance between steps, {name}", "over random order", _ratio(before, name), _ratio(after, name))
        for name in before.variances
    ]
    summary = (
        f"A sample costs {abs(saved):.1%} {'less' if saved >= 0 else 'more'} than before, by forward FLOP with the "
        "waiting of ranks for each other.\n"
        "`autotune tune JOB` measures memory and the fixed cost of a micro-batch"
    )
    sections = (header, table(("metric", "unit", "before", "after"), rows), summary, *_problems(found))
    return "\n\n".join(sections)


def pack_document(found: Balanced) -> dict[str, Any]:
    """Return the contents of `pack_text` as JSON values; ratios are shares of 1."""
    material = found.material
    return {
        "input": str(material.path),
        "data_parallel": material.data_parallel,
        "global_batch_samples": material.settings.global_batch_samples,
        "seed": material.settings.seed,
        "epoch": found.number,
        "cost_model": {
            "name": material.cost_model,
            **wire.to_document(material.settings.weights),
            "forward": wire.to_document(material.forward),
        },
        "packing": wire.to_document(found.packing),
        "reason": found.reason,
        "before": _side(found.before),
        "after": _side(found.after),
        "oversize": {
            "rule": material.settings.oversize,
            "samples": len(found.oversize),
            "first": [
                {"where": material.index.where(int(row)), **wire.to_document(material.index.lengths(int(row)))}
                for row in found.oversize[:_SHOWN_IN_DOCUMENT]
            ],
        },
        "cut": {"max_tokens": material.found.max_tokens, "samples": material.cut},
        "wrong_sizes": material.found.wrong_sizes,
        "records": material.found.records,
        "bad": material.found.bad,
        "bad_lines": [str(line) for line in material.found.bad_lines],
        "unused": [wire.to_document(each) for each in material.found.unused],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        **wire.to_document(side.balance),
        "cost_per_sample": side.balance.cost_per_sample,
        "forward_flops_per_sample": side.sample_flops,
        "mixing": side.mixing,
        "variances": side.neutrality.variances,
    }


def _problems(found: Balanced) -> Iterator[str]:
    """Yield a text for each kind of problem: over-size and cut samples, wrong image sizes, bad records."""
    index, report, above, cut = found.material.index, found.material.found, found.oversize, found.material.cut
    if len(above):
        rule = _RULES[found.material.settings.oversize]
        capacities = f"Qv {found.packing.qv}, Qt {found.packing.qt}"
        title = (
            f"{_count(len(above))} of {_count(len(index))} samples {'is' if len(above) == 1 else 'are'} above "
            f"{capacities}; {rule}"
        )
        lines = [
            f"{index.where(int(row))}: {index.vision_units[row]} vision units, {index.text_tokens[row]} text tokens"
            for row in above[:_SHOWN]
        ]
        yield _listed(title, lines, len(above))
    if cut:
        title = (
            f"{_count(cut)} of {_count(len(index))} samples {'has' if cut == 1 else 'have'} "
            f"{report.max_tokens:,} tokens"
        )
        # The index knows lengths after the cut alone; a sample of exactly this length looks the same.
        rows = np.flatnonzero(index.text_tokens == report.max_tokens)[:_SHOWN]
        yield _listed(f"{title}: longer ones were cut to that", [index.where(int(row)) for row in rows], cut)
    if report.wrong_sizes:
        images = number_of(report.wrong_sizes, "image has", "images have")
        yield f"{images} another size than recorded; the size in the file is used"
    yield from (f"Probably a mistake: {each}; {each.remedy}" for each in report.mistakes)
    if unused := report.unused_lines():
        yield "\n".join(("Not used by a training:", *(f"  {line}" for line in unused)))
    if report.bad:
        title = f"{_count(report.bad)} of {_count(report.records)} records cannot be used"
        yield _listed(title, [str(line) for line in report.bad_lines[:_SHOWN]], report.bad)


def _listed(title: str, lines: Sequence[str], count: int) -> str:
    """Return a title, the first lines of `count`, and the number of others."""
    more = [f"  and {_count(count - _SHOWN)} more"] if count > _SHOWN else []
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines), *more])
