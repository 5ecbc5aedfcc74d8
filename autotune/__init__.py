"""The tuner: reads the job, predicts, searches, launches and reports.

The names of `__all__` are the public interface (docs/library.md). Each is imported when it is first used, so that
`import autotune` costs nothing.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.advice.recommendation import Recommendation
    from autotune.exporting.export import Exported
    from autotune.forecast.forecast import Forecast
    from autotune.forecast.what_if import WhatIf
    from autotune.job_file import load_job
    from autotune.library.best_plan import best_plan
    from autotune.library.export import export
    from autotune.library.launch import launch
    from autotune.library.pack import pack, what_if
    from autotune.library.predict import predict
    from autotune.library.recommend import recommend
    from autotune.library.tune import tune
    from autotune.loop.collator import PackCollator
    from autotune.loop.sampler import EvenPackSampler, PackSampler, PackStep
    from autotune.loop.samples import SampleDataset
    from autotune.packing.balance import Balanced
    from autotune.training.full_training import Launched
    from storage.records import BestPlan
    from trials.errors import AutotuneError
    from trials.job import Job
    from trials.plan import Plan

    __version__: str

__all__ = [
    "AutotuneError",
    "Balanced",
    "BestPlan",
    "EvenPackSampler",
    "Exported",
    "Forecast",
    "Job",
    "Launched",
    "PackCollator",
    "PackSampler",
    "PackStep",
    "Plan",
    "Recommendation",
    "SampleDataset",
    "WhatIf",
    "best_plan",
    "export",
    "launch",
    "load_job",
    "pack",
    "predict",
    "recommend",
    "tune",
    "what_if",
]
_MODULES = {
    "AutotuneError": "trials.errors",
    "Balanced": "autotune.packing.balance",
    "BestPlan": "storage.records",
    "EvenPackSampler": "autotune.loop.sampler",
    "Exported": "autotune.exporting.export",
    "Forecast": "autotune.forecast.forecast",
    "Job": "trials.job",
    "Launched": "autotune.training.full_training",
    "PackCollator": "autotune.loop.collator",
    "PackSampler": "autotune.loop.sampler",
    "PackStep": "autotune.loop.sampler",
    "Plan": "trials.plan",
    "Recommendation": "autotune.advice.recommendation",
    "SampleDataset": "autotune.loop.samples",
    "WhatIf": "autotune.forecast.what_if",
    "best_plan": "autotune.library.best_plan",
    "export": "autotune.library.export",
    "launch": "autotune.library.launch",
    "load_job": "autotune.job_file",
    "pack": "autotune.library.pack",
    "predict": "autotune.library.predict",
    "recommend": "autotune.library.recommend",
    "tune": "autotune.library.tune",
    "what_if": "autotune.library.pack",
}

_HOME = Path(__file__).resolve().parents[1]

for _name in ("storage", "trials"):  # common names, which a folder of the user's may have as well
    _spec = find_spec(_name)
    _found = [str(Path(_place).resolve()) for _place in (_spec and _spec.submodule_search_locations) or ()]
    if _found != [str(_HOME / _name)]:
        raise ImportError(
            f"autotune needs its own package {_name!r} in {_HOME}, but Python finds {', '.join(_found) or 'none'}; "
            "remove the folder that contains it from PYTHONPATH, rename it, or start autotune in another folder"
        )


if not TYPE_CHECKING:  # type checkers would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("vlm-autotune")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
