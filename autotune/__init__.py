"""The tuner: reads the job, predicts, searches, launches and reports."""

from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parents[1]

for _name in ("storage", "trials"):  # common names, which a folder of the user's may have as well
    _spec = find_spec(_name)
    _found = [str(Path(_place).resolve()) for _place in (_spec and _spec.submodule_search_locations) or ()]
    if _found != [str(_HOME / _name)]:
        raise ImportError(
            f"autotune needs its own package {_name!r} in {_HOME}, but Python finds {', '.join(_found) or 'none'}; "
            "remove the folder that contains it from PYTHONPATH, rename it, or start autotune in another folder"
        )
