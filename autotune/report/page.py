"""The page of a report: one HTML file with its style, its script and its data."""

import base64
import hashlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autotune.errors import PackError
from autotune.report.charts.quantities import PLUS_MINUS

GENERATOR = "autotune report"
_TEMPLATE = Path(__file__).parent / "template"
_BUNDLER = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle(sys.stdin.buffer.read().decode()).encode())
"""


@cache
def start_bundle() -> "Future[str]":
    """Begin to build the page's script, with Vega-Lite in it, in a process of its own.

    That takes two seconds, in which vl-convert holds the interpreter's lock.
    """
    pool = ThreadPoolExecutor(1)
    try:
        config, script = ((_TEMPLATE / name).read_bytes() for name in ("config.json", "page.js"))
        return pool.submit(_bundle, b"const config = %b;\n%b" % (config, script))
    finally:
        # Not joined: the thread ends after its task.
        pool.shutdown(wait=False)


def _bundle(snippet: bytes) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", _BUNDLER], input=snippet, capture_output=True, check=False)
    if done.returncode:
        raise PackError(f"the script of the report cannot be built: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def render(values: Mapping[str, object], script: str, shown: Callable[[str], str]) -> str:
    """Return the page. `shown` makes the control characters in names visible; HTML in them is escaped here.

    The page's policy lets the browser run this script alone, and load nothing.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    script = script.replace("</script", "<\\/script")  # which would end the element, and is in strings alone
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    macros: Any = environment.get_template("table.html").module
    page = environment.get_template("page.html").render(
        _tidy(values, shown),
        table=macros.table,
        generator=GENERATOR,
        # Vega compiles its expressions.
        policy=f"default-src 'none'; script-src 'sha256-{digest}' 'unsafe-eval'; style-src 'unsafe-inline'",
        plus_minus=PLUS_MINUS,
        version=version("vlm-autotune"),
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    body, end, rest = page.rpartition("</body>")  # the script is no template
    return f'{body}<script type="module">{script}</script>\n{end}{rest}'


def _tidy(value: object, shown: Callable[[str], str]) -> Any:
    """Return plain values in which every text is shown safely."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return _tidy(asdict(value), shown)
    if isinstance(value, Mapping):
        return {name: _tidy(one, shown) for name, one in value.items()}
    if isinstance(value, Iterable):
        return [_tidy(one, shown) for one in value]
    return value
