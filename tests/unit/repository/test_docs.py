"""The documentation matches the code."""

import ast
import importlib.util
import json
import re
import shlex
import signal
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from configparser import ConfigParser
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from autotune import errors
from autotune.cli import main
from autotune.cli.context import Terminated
from autotune.cli.parameters import DefaultGroup
from benchmarks.output import chart
from storage.database.tables import METADATA
from trials.errors import AutotuneError

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
COMMANDS = ROOT / "docs" / "cli.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
STORAGE = ROOT / "docs" / "storage.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCS = (README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md")))
PACKAGES = ("autotune", "storage", "trials")
SHELL = ("|", ">", "&&", ";")
PATH = re.compile(r"(?<![\w/])(?:autotune|storage|trials|tests|examples|docs|constraints|benchmarks)/[\w./-]*\w")
BLOCK = re.compile(r"^( *)```\w*\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?autotune (.+)$", flags=re.MULTILINE)
MODULE = re.compile(r"\b(?:benchmarks|storage|trials)(?:\.[a-z_]+)+\b")
BENCHMARK = re.compile(r"\bpython -m (benchmarks[\w.]+)((?: --?\w[^`#\n]*)?)")
NAME = re.compile(r"(?=.*(?:[a-z]_|[a-z][A-Z]))\w+(?:\.\w+)*")
FOREIGN = {"ByteSize", "pg_dump", "stage3_max_live_parameters", "wall_clock_breakdown"}
"""Names of others that the documents mention and the code does not use."""


def documents(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make a test of all documents of a check of one, which a failure names."""

    def of_all() -> None:
        for document in DOCS:
            try:
                check(document)
            except Exception as error:
                error.add_note(f"in {document}")
                raise

    of_all.__name__ = check.__name__
    return of_all


def spans(document: Path) -> list[str]:
    """Return the inline code of a document."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", document.read_text()))


def blocks(document: Path) -> str:
    return "\n".join(textwrap.dedent(block) for _, block in BLOCK.findall(document.read_text()))


def rows(document: Path, *header: str) -> list[list[str]]:
    """The cells of every table with this header."""
    return rows_of(document.read_text(), *header)


def rows_of(text: str, *header: str) -> list[list[str]]:
    lines = text.splitlines()
    start = f"| {' | '.join(header)} |"
    found: list[list[str]] = []
    for number in (number for number, line in enumerate(lines) if line == start):
        for line in lines[number + 2 :]:
            if not line.startswith("|"):
                break
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def options_of(command: click.Command) -> set[str]:
    parameters = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {"-h", "--help"}.union(*({*option.opts, *option.secondary_opts} for option in parameters))


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(inner) for inner in kind.__subclasses__()))


# --- commands ---


def commands(group: click.Group = main, prefix: str = "") -> dict[str, click.Command]:
    """Return every command; those of groups begin with the group's name."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found |= commands(command, f"{prefix}{name} ") if isinstance(command, click.Group) else {prefix + name: command}
    return found


def split(words: list[str]) -> tuple[str, list[str]]:
    """(the command that a line begins with, the rest of the line)."""
    group = main.commands.get(words[0])
    if isinstance(group, DefaultGroup) and not (words[1:] and words[1] in group.commands):
        words = [words[0], group.default, *words[1:]]
    length = 2 if isinstance(group, click.Group) else 1
    return " ".join(words[:length]), words[length:]


def test_every_command_is_documented_with_its_own_options() -> None:
    listed = {split(row[0].strip("`").split()[1:])[0]: set(re.findall(r"`([^`]+)`", row[2])) for row in _command_rows()}
    common = set.intersection(*map(options_of, commands().values()))
    assert listed == {name: options_of(command) - common for name, command in commands().items()}


def test_the_arguments_of_each_command_are_documented() -> None:
    for usage, *_ in _command_rows():
        name, arguments = split(usage.strip("`").split()[1:])
        parameters = [each for each in commands()[name].params if isinstance(each, click.Argument)]
        assert [argument.startswith("[") for argument in arguments] == [not each.required for each in parameters]
        context = click.Context(commands()[name])
        shown = [piece for each in parameters for piece in each.get_usage_pieces(context)]
        assert arguments == ["SHELL" if "|" in piece else piece for piece in shown]


def test_the_options_that_all_commands_share_are_documented() -> None:
    sentence = COMMANDS.read_text().partition("Every command takes")[2].partition("stderr")[0]
    named = set(re.findall(r"`(-[\w-]+)`", sentence))
    own = {option for *_, options in _command_rows() for option in re.findall(r"`([^`]+)`", options)}
    for command in commands().values():
        given = (set(p.opts) for p in command.params if isinstance(p, click.Option))
        assert named <= options_of(command)
        assert all(options & (named | own) for options in given)


@documents
def test_command_lines_in_the_documents_are_valid(document: Path) -> None:
    for line in COMMAND_LINE.findall(blocks(document)):
        words = [*takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True))]
        name, arguments = ("autotune", words) if words[0].startswith("-") else split(words)
        command = main if words[0].startswith("-") else commands()[name]
        with suppress(click.exceptions.Exit):  # of --help and --version
            command.make_context(name, arguments)


@documents
def test_options_in_sentences_of_the_documents_exist(document: Path) -> None:
    for span in (span for span in spans(document) if span.startswith("autotune ")):
        words = shlex.split(span)[1:]
        known = options_of(main) if words[0].startswith("-") else options_of(commands()[split(words)[0]])
        assert {word for word in words if word.startswith("-")} <= known, span


@documents
def test_make_targets_in_the_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"^make ([\w-]+)$", blocks(document), flags=re.MULTILINE)
    named += [span.split()[1] for span in spans(document) if span.startswith("make ")]
    assert set(named) <= targets


def test_every_exit_code_is_documented() -> None:
    kinds = subclasses(AutotuneError)
    codes = {errors.exit_code(kind()) for kind in kinds} | {0, Terminated(signal.SIGINT).exit_code}
    assert {int(row[0]) for row in rows(COMMANDS, "exit code", "meaning")} == codes


def _command_rows() -> list[list[str]]:
    return rows(COMMANDS, "command", "what it does", "options")


# --- files and names ---


@documents
def test_files_and_modules_that_the_documents_name_exist(document: Path) -> None:
    code = "\n".join((*spans(document), blocks(document)))
    modules = [f"{name.replace('.', '/')}.py" for name in MODULE.findall(code)]
    missing = {name for name in (*PATH.findall(code), *modules) if not (ROOT / name).exists()}
    assert not missing


@documents
def test_names_in_the_documents_are_names_in_the_code(document: Path) -> None:
    found = {span for span in spans(document) if NAME.fullmatch(span)}
    files = {span for span in found if span.endswith(".py")}
    assert files <= {file.name for file in sources()}
    names = {name for span in found - files for name in span.split(".")} - FOREIGN
    assert not [name for name in names if name not in code()]


@cache
def sources() -> tuple[Path, ...]:
    folders = (*PACKAGES, "benchmarks", "examples", "tests")
    return tuple(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def code() -> str:
    return "\n".join((*(file.read_text() for file in sources()), (ROOT / "setup.cfg").read_text()))


@documents
def test_options_of_benchmarks_in_the_documents_exist(document: Path) -> None:
    code = "\n".join((*spans(document), blocks(document), *re.findall(r"^#+ .*", document.read_text(), re.MULTILINE)))
    for module, arguments in BENCHMARK.findall(code):
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert not [option for option in re.findall(r"--[\w-]+", arguments) if f'"{option}"' not in source], module


def test_the_architecture_names_every_folder() -> None:
    folders = {module.parent for package in PACKAGES for module in (ROOT / package).rglob("*.py")}
    named = {word for span in spans(ARCHITECTURE) for word in (span, span.rpartition("/")[2])}
    assert not [folder for folder in folders if folder.name not in named]


def test_the_drawings_of_the_architecture_are_those_of_the_imports() -> None:
    spec = importlib.util.spec_from_file_location("floors", ROOT / "docs" / "floors.py")
    assert spec is not None
    assert spec.loader is not None
    floors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(floors)
    assert floors.drawn() == ARCHITECTURE.read_text(), "draw them again with `make chart`"


def test_every_table_of_the_database_is_documented() -> None:
    listed = {name for cell, _ in rows(STORAGE, "table", "one row is") for name in re.findall(r"`(\w+)`", cell)}
    assert listed == {name.removeprefix("autotune_") for name in METADATA.tables}


def test_all_code_that_deletes_or_replaces_is_listed() -> None:
    listed = STORAGE.read_text().partition("## What deletes or replaces something")[2]
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "versions" not in file.parts]
    deleting = [file.relative_to(ROOT) for file in files if any(map(deletes, ast.walk(ast.parse(file.read_text()))))]
    assert deleting
    assert not [file for file in deleting if f"`{file}`" not in listed]


def deletes(node: ast.AST) -> bool:
    """Return whether it is a call that deletes rows, or deletes or replaces a file or folder."""
    match node:
        case (
            ast.Call(func=ast.Name(id="delete"))
            | ast.Call(func=ast.Attribute(attr="unlink" | "rmdir" | "rmtree" | "rename" | "delete_study"))
        ):
            return True
        case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):  # of a path: texts take two
            return True
    return False


@documents
def test_all_rows_of_a_table_have_as_many_cells_as_its_header(document: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(BLOCK, "", document.read_text()), flags=re.MULTILINE)
    for table in tables:
        cells = {row: len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        uneven = [row for row, count in cells.items() if count != next(iter(cells.values()))]
        assert not uneven


def anchors(document: Path) -> set[str]:
    """What a link may name after `#`: headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", document.read_text()):
        file = document.parent / target if target else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@documents
def test_names_that_are_listed_for_a_file_are_defined_in_it(document: Path) -> None:
    for file, names, _ in rows(document, "file", "functions", "what happens"):
        source = (ROOT / file.strip("`")).read_text()
        assert_defines(source, names, file)


def test_contributing_answers_ten_questions_with_a_file_each() -> None:
    answers = rows(CONTRIBUTING, "question", "file", "names")
    assert len({question for question, *_ in answers}) == 10
    for _, file, names in answers:
        assert_defines((ROOT / file.strip("`")).read_text(), names, file)


def assert_defines(source: str, names: str, file: str) -> None:
    for name in re.findall(r"\w+", names):
        assert re.search(rf"\b(def|class) {name}\b|^{name} =", source, flags=re.MULTILINE), f"{file}: {name}"


def test_extras_that_the_documents_name_exist() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = "".join(document.read_text() for document in DOCS)
    named = {extra for extras in re.findall(r"(?:vlm-autotune|'\.)\[([\w,]+)\]", text) for extra in extras.split(",")}
    assert named
    assert named <= set(setup["options.extras_require"])


def test_the_readme_has_at_most_120_lines() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_terms_of_the_glossary_are_sorted_and_defined_once() -> None:
    terms = [term.lower() for term, _ in rows(GLOSSARY, "term", "meaning")]
    assert terms == sorted(set(terms))


# --- the recorded tuning ---


def test_the_chart_shows_the_recorded_tuning(tmp_path: Path) -> None:
    record = json.loads(chart.RECORD.read_text())
    chart.draw(record, tmp_path / "chart.svg")
    assert drawn(chart.CHART) == (record, drawn(tmp_path / "chart.svg")[1])


def drawn(svg: Path) -> tuple[Any, list[str]]:
    """(the record that a chart was drawn from, the texts in it)."""
    root = ET.parse(svg).getroot()
    source = root.findtext("{http://www.w3.org/2000/svg}desc")
    assert source
    return json.loads(source), [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_result_in_the_readme_is_the_recorded_tuning() -> None:
    record = json.loads(chart.RECORD.read_text())
    result = record["result"]
    text = README.read_text()
    table = [re.split(r"\s{2,}", line) for line in blocks(README).splitlines()]
    speed = {row["role"]: row for row in ({**result, "role": "best"}, *result["baselines"])}
    shown = {row[0]: row[1:] for row in table if row[0] in speed}
    assert {name: cells[0] for name, cells in shown.items()} == {
        name: f"{row['estimated_samples_per_second']:.1f} +- {row['estimated_samples_per_second_error']:.1f}"
        for name, row in speed.items()
    }
    assert shown["best"][1] == f"{result['epoch_seconds']:.1f}"
    for baseline in result["baselines"]:
        assert shown[baseline["role"]][2] == f"{baseline['gain']:.2f} +- {baseline['gain_error']:.2f}"
    assert f"Plan {result['id']}\n" in text
    assert f"recorded on {record['recorded']}" in text
    in_words = ", ".join(
        f"{chart.NAMES[each['role']]} {each['estimated_samples_per_second']}" for each in result["baselines"]
    )
    assert f"{in_words[0].lower()}{in_words[1:]}, autotune {result['estimated_samples_per_second']} samples/s" in text


def test_the_tutorial_shows_the_recorded_tuning_too() -> None:
    (result,) = (block for _, block in BLOCK.findall(README.read_text()) if block.startswith("Plan "))
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    assert result in tutorial
    # What the tutorial says about this plan.
    assert "pipeline 1 x data 2" in result
    assert "recompute 8v+1l" in result
    assert "recomputes 8 vision layers and one language layer" in tutorial


@documents
def test_documents_are_plain_text(document: Path) -> None:
    assert document.read_text().isascii()
