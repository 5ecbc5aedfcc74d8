"""`autotune mcp`, asked over pipes by the client of the protocol's own package."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from anyio.from_thread import BlockingPortal
from click.testing import CliRunner

from autotune.cli import main
from autotune.cli.assistants.provenance import ORIGINS
from autotune.forecast.profile_file import ProfiledCosts
from autotune.machine.devices import locked
from autotune.machine.hardware import software
from autotune.model_shape import model_shape
from tests.integration.assistants.conftest import Assistant, connected, told_by
from tests.programs.processes import children, ranks, wait_for, wait_for_the_end
from tests.unit.repository.test_docs import ROOT
from tests.values import search
from tests.values.storage import (
    NOON,
    PADDED_PLAN,
    WORKLOAD,
    packed_plan,
)
from tests.values.training import job_of, plan_of
from trials import wire
from trials.costs.layer_costs import LinkCost

LOOKS = {"recommend", "doctor", "pack", "predict", "plans", "show", "compare", "studies"}
RUNS = {"tune", "launch"}
SKILL = ROOT / "skills" / "autotune" / "SKILL.md"
BEST, OTHER = packed_plan().id, PADDED_PLAN.id


@pytest.fixture(scope="module")
def profile(example: Path, folder: Path) -> Path:
    """A profile of the example's model on devices that are not here."""
    costs = replace(search.COSTS, link=LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-9))
    profiled = ProfiledCosts(
        hardware=replace(WORKLOAD.hardware, devices=2),
        model=model_shape(job_of(example, folder).model),
        software=software(),
        created=NOON,
        costs=costs,
    )
    path = folder / "costs.json"
    path.write_text(wire.encode(profiled))
    return path


def numbers(
    value: object, rules: Mapping[str, str], origin: str, path: str = "", parent: str = ""
) -> Iterator[tuple[str, str]]:
    """(path, origin) of each number, by the innermost of the keys in `rules`."""
    match value:
        case dict():
            for key, inner in value.items():
                rule = rules.get(f"{parent}.{key}") or rules.get(key, origin)
                yield from numbers(inner, rules, rule, f"{path}.{key}", key)
        case list():
            for inner in value:
                yield from numbers(inner, rules, origin, f"{path}[]", parent)
        case bool():
            return
        case int() | float():
            yield path, origin


def origins(answered: Mapping[str, Any]) -> dict[str, str]:
    provenance = answered["provenance"]
    found = dict(numbers(answered["result"], provenance["except"], provenance["numbers"]))
    assert set(found.values()) <= set(provenance["meanings"]) <= set(ORIGINS)
    return found


def test_a_server_offers_runs_only_where_it_was_allowed(reader: Assistant, runner: Assistant) -> None:
    for assistant, expected in ((reader, LOOKS), (runner, LOOKS | RUNS)):
        tools = assistant.portal.call(assistant.client.list_tools).tools
        assert {tool.name for tool in tools} == expected
        for tool in tools:
            assert tool.annotations
            assert tool.annotations.read_only_hint is (tool.name in LOOKS)
            assert tool.description
            assert not {"out", "plot", "db", "json"} & tool.input_schema["properties"].keys()
            assert all(each["description"] for each in tool.input_schema["properties"].values())


def test_stored_plans_and_studies_have_the_origin_of_each_number(reader: Assistant) -> None:
    (best,) = reader.answered("plans", hardware="A100")["result"]["plans"]
    assert best["id"] == BEST
    assert reader.answered("plans", hardware="H100")["result"]["plans"] == []
    shown = origins(reader.answered("show", plan=BEST[:6]))
    assert shown[".epoch_seconds"] == shown[".trials[].result.epoch_seconds"] == "measured"
    assert shown[".launches[].windows[].training_samples_per_second"] == "measured"
    assert shown[".plan.packing.qt"] == shown[".workload.data.samples"] == shown[".evidence.runs"] == "exact"
    assert shown[".explanation.plans[].parts[].seconds"] == "field basis"
    assert shown[".explanation.changes[].gain"] == "field measured"
    assert shown[".confidence"] == "measured or predicted"
    compared = reader.answered("compare", first=BEST, second=OTHER)
    assert origins(compared)[".speed_ratio.mean"] == origins(compared)[".plans[].stages[].peak_bytes"] == "measured"
    assert [each["id"] for each in compared["result"]["plans"]] == [BEST, OTHER]
    (study,) = reader.answered("studies")["result"]["studies"]
    assert origins(reader.answered("studies", study=study["name"]))[".trials[].result.epoch_seconds"] == "measured"


@pytest.fixture
def devices_in_use(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the devices, so that `doctor` tries no layers on them: for that it starts a process that imports torch."""
    monkeypatch.setenv("XDG_STATE_HOME", environment["XDG_STATE_HOME"])
    with locked(("cpu",)):
        yield


@pytest.mark.usefixtures("devices_in_use")
def test_a_forecast_says_that_it_was_fitted_and_packs_that_they_were_counted(
    runner: Assistant, job: Path, profile: Path, folder: Path
) -> None:
    plan = folder / "predicted.json"
    plan.write_text(wire.encode(plan_of("12+8", data=2)))
    answered = runner.answered("predict", job=str(job), device_profile=str(profile), plan=str(plan))
    found = origins(answered)
    assert found[".plans[].epoch_seconds"] == found[".plans[].stages[].expected"] == "predicted"
    assert found[".plans[].plan.layout.data"] == found[".samples"] == found[".skipped_lines"] == "exact"
    found = origins(runner.answered("pack", job=str(job), set=["training.global_batch_samples=4"], qv=10, qt=500))
    assert found[".after.text_fill"] == found[".global_batch_samples"] == "exact"
    assert found[".after.cost_per_sample"] == "analytic"
    answered = runner.answered("pack", job=str(job), what_if=["cutoff=200"])
    assert origins(answered)[".variants[].operations"] == "analytic"
    assert answered["provenance"]["except"]["epoch_seconds"] == "predicted"
    answered = runner.answered("doctor", job=str(job))
    assert origins(answered)[".least_memory.bytes"] == "field origin"
    assert answered["result"]["data"]["samples"] == 48


def test_a_question_about_a_model_and_data_ends_in_a_launched_dry_run(
    runner: Assistant, example: Path, job: Path, folder: Path
) -> None:
    model, data, devices = str(example / "model"), [str(example / "data" / "train.jsonl")], 2
    assert "no data sheet of a device 'abacus'" in runner.refused("recommend", model=model, data=data, device="abacus")
    settings = ["model.dtype=float32", "training.global_batch_samples=8"]
    answered = runner.answered(
        "recommend", model=model, data=data, device="h100", devices=[devices], deadline="24h", set=settings
    )
    found = origins(answered)
    assert found[".choices[].epoch_seconds"] == found[".choices[].relative_error"] == "field origin"
    assert [each["origin"] for each in answered["result"]["choices"]] == [found[".data_sheet.flops"]] == ["analytic"]
    assert found[".choices[].plan.packing.qt"] == found[".skipped_lines"] == "exact"
    assert answered["result"]["advised_devices"] == devices
    plan = folder / "plan.json"
    plan.write_text(json.dumps(answered["result"]["choices"][0]["plan"]))
    launched = runner.answered("launch", job=str(job), plan=str(plan), dry_run=True)
    commands = launched["result"]["commands"]
    assert len(commands) == devices
    assert all("--request" in command["argv"] for command in commands)
    assert set(origins(launched).values()) <= {"exact"}
    assert not (folder / "output").exists()


def test_a_run_that_fails_ends_with_its_message_and_the_server_goes_on(runner: Assistant, folder: Path) -> None:
    absent = folder / "absent.yaml"
    assert runner.refused("tune", job=str(absent)) == f"{absent}: no such file; give the path of a job file"
    assert runner.answered("plans")["result"]["plans"]


def test_a_run_may_write_long_lines(portal: BlockingPortal, environment: dict[str, str], tmp_path: Path) -> None:
    script = "import sys\nif 'tune' in sys.orig_argv: print('x' * 100_000, file=sys.stderr)\n"
    (tmp_path / "sitecustomize.py").write_text(script)
    places = os.pathsep.join(filter(None, (str(tmp_path), environment.get("PYTHONPATH"))))
    for assistant in connected(portal, {**environment, "PYTHONPATH": places}, "--allow-runs"):
        assert "no such file" in assistant.refused("tune", job=str(tmp_path / "absent.yaml"))


@pytest.mark.ranks
@pytest.mark.long
def test_a_training_tells_its_progress_while_the_server_answers_other_questions(
    runner: Assistant, job: Path, folder: Path
) -> None:
    plan, heard = folder / "halves.json", list[str | None]()
    plan.write_text(wire.encode(plan_of("12+8", data=2)))

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    training = runner.begin("launch", {"job": str(job), "plan": str(plan), "steps": 2}, hear)
    wait_for(lambda: heard)
    assert runner.answered("plans")["result"]["plans"]
    assert not training.done()
    answered = told_by(training.result())
    assert answered["result"]["steps"] == 2
    assert origins(answered)[".training_samples_per_second"] == "measured"
    assert any("raining" in (message or "") for message in heard)


@pytest.mark.ranks
@pytest.mark.long
def test_a_cancelled_search_ends_with_its_processes(runner: Assistant, job: Path) -> None:
    search = runner.begin("tune", {"job": str(job)})

    def started() -> list[psutil.Process]:
        commands = [each for each in children() if "tune" in each.cmdline()]
        return [each for command in commands for each in (command, *ranks(command.pid))]

    wait_for(lambda: len(started()) > 1)
    processes = started()
    search.cancel()
    wait_for_the_end(processes)
    assert runner.answered("plans")["result"]["plans"]


def test_each_call_warns_of_a_mixture_s_ignored_keys(runner: Assistant, job: Path, example: Path) -> None:
    document = yaml.safe_load(job.read_text())
    (source,) = document["data"]["sources"]
    entry = {"annotation": source["path"], "root": str(example / "data"), "data_augment": True}
    meta = job.with_name("meta.json")
    meta.write_text(json.dumps({"all": entry}))
    document["data"]["sources"] = [{"path": str(meta)}]
    mixed = job.with_name("mixed.yaml")
    mixed.write_text(yaml.safe_dump(document))
    for _ in range(2):
        (note,) = runner.answered("pack", job=str(mixed))["notes"]
        assert "data_augment is ignored" in note


def test_a_look_up_begins_when_the_one_before_has_ended_also_if_that_is_cancelled(
    portal: BlockingPortal, environment: dict[str, str]
) -> None:
    """The first look-up warns late: while the second one runs, if that does not wait."""
    script = (
        "import logging, threading, autotune.cli.doctor as doctor\n"
        "examine, second_runs, first_warned = doctor.examine, threading.Event(), threading.Event()\n"
        "def second(*given):\n"
        "    second_runs.set(); first_warned.wait(30)\n"
        "    return examine(*given)\n"
        "def first(options, *given):\n"
        "    doctor.examine = second\n"
        "    options.display.show('begun'); second_runs.wait(2)\n"
        "    logging.getLogger('autotune').warning('of the first'); first_warned.set()\n"
        "    return examine(options, *given)\n"
        "doctor.examine = first\n"
        "from autotune.cli import main\n"
        "main()"
    )
    heard = list[str | None]()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    for assistant in connected(portal, environment, program=("-c", script)):
        first = assistant.begin("doctor", {}, hear)
        wait_for(lambda: heard)
        first.cancel()
        answered = assistant.answered("doctor")
        assert "of the first" not in (*answered["notes"], *answered["result"]["warnings"])


def test_only_messages_of_the_protocol_are_written_to_stdout_also_by_a_tool_that_prints_and_breaks(
    environment: dict[str, str],
) -> None:
    """It prints in three ways, as libraries do, and its second call is a bug."""
    script = (
        "import os, autotune.cli.doctor as doctor\n"
        "examine = doctor.examine\n"
        "def loud(*given):\n"
        "    print('stray', flush=True); os.write(1, b'stray\\n'); os.system('echo stray')\n"
        "    doctor.examine = lambda *_: 1 / 0\n"
        "    return examine(*given)\n"
        "doctor.examine = loud\n"
        "from autotune.cli import main\n"
        "main(['mcp'])"
    )
    environment = {**environment, "AUTOTUNE_DB_URL": "sqlite:////proc/absent.db"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    doctor = {"method": "tools/call", "params": {"name": "doctor", "arguments": {}}}
    messages: tuple[dict[str, Any], ...] = (
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        *({"id": number, **doctor} for number in (2, 3)),
        {"id": 4, "method": "tools/list"},
    )
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen([sys.executable, "-P", "-c", script], env=environment, **pipes) as server:
        assert server.stdin
        assert server.stdout
        for message in messages:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
        answers = sorted((json.loads(server.stdout.readline()) for _ in range(4)), key=itemgetter("id"))
        rest, errors = server.communicate()
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4]
    assert "error" in answers[2]
    assert len(answers[3]["result"]["tools"]) == len(LOOKS)
    answered = answers[1]["result"]["structuredContent"]
    assert answered["result"]["hardware"]["accelerator"] == "cpu"
    assert "/proc/absent.db" in answered["notes"][-1]
    assert rest == ""
    assert errors.count("stray") == 3
    assert server.returncode == 0


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.context", None)
    answer = CliRunner().invoke(main, ["mcp"])
    assert answer.exit_code == 2
    assert "`autotune mcp` needs 'mcp>=2.3,<3'; pip install 'mcp>=2.3,<3'" in answer.stderr


def test_the_skill_names_the_tools_and_the_origins_of_numbers() -> None:
    _, front, body = SKILL.read_text().split("---\n", maxsplit=2)
    about = yaml.safe_load(front)
    assert about["name"] == SKILL.parent.name
    assert len(about["description"]) <= 1024
    assert all(f"`{name}`" in body for name in LOOKS | RUNS)
    assert all(f"- `{name}`:" in body for name in ("measured", "predicted", "analytic", "exact"))
    assert len(SKILL.read_text().splitlines()) <= 60
