"""Optuna's own dashboard on our database: in a headless Chromium where one is installed, else through its HTTP API."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from storage.store import open_store
from tests.search_bench import PREDICTOR, Bench
from tests.simulated import SimulatedLauncher
from trials.outcome import Failed, OutOfMemory
from trials.plan import Plan

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_SECONDS, RENDER_MILLISECONDS = 60.0, 20_000


@contextmanager
def dashboard(url: str) -> Iterator[str]:
    """Start the dashboard like a user, and provide its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("optuna-dashboard")
    with subprocess.Popen(
        [program, url, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        try:
            _wait(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    server.terminate()
    raise AssertionError(server.communicate()[0])


def ask(address: str) -> Any:
    with urlopen(address, timeout=30) as answer:
        return json.load(answer)


def rendered(address: str, folder: Path) -> str:
    """Return the document that the browser shows."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
    command += [f"--user-data-dir={folder}", f"--virtual-time-budget={RENDER_MILLISECONDS}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_dashboard_shows_studies_parameters_constraints_and_states(database_url: str, tmp_path: Path) -> None:
    with open_store(database_url) as store:
        bench = Bench(tmp_path, store)
        study = bench.study()
        too_large = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
        first: list[Plan] = []

        def cause_of(plan: Plan) -> OutOfMemory | None:
            first.append(plan)
            return too_large if plan == first[0] else None

        bench.search(study, SimulatedLauncher(PREDICTOR, cause_of=cause_of), trials=6)
        trials = {trial.id: trial for trial in bench.stored(study)}
    with dashboard(database_url) as address:
        summaries = {each["study_name"]: each["study_id"] for each in ask(f"{address}/api/studies")["study_summaries"]}
        number = summaries[study.name]
        shown = ask(f"{address}/api/studies/{number}?after=0")["trials"]
        if CHROMIUM:
            assert study.name in rendered(f"{address}/dashboard", tmp_path / "chromium")
            page = rendered(f"{address}/dashboard/studies/{number}/analytics", tmp_path / "chromium")
            assert all(text in page for text in (study.name, "Param boundary_0", "layout"))
    assert len(shown) == len({told_of(each)["trial_id"] for each in shown}) >= 6
    for each in shown:
        trial = trials[told_of(each)["trial_id"]]
        parameters = {parameter["name"]: parameter["param_external_value"] for parameter in each["params"]}
        assert {name: str(value) for name, value in trial.parameters.items()}.items() <= parameters.items()
        assert each["state"] == "Complete"
        (constraint,) = each["constraints"]
        assert (constraint > 0) == (trial.result.outcome == Failed(cause=too_large))
    assert sum(each["constraints"][0] > 0 for each in shown) == 1


def told_of(trial: dict[str, Any]) -> dict[str, str]:
    return {each["key"]: each["value"] for each in trial["user_attrs"]}
