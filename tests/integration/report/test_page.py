"""The report in a real browser: drawn, quiet, offline, readable everywhere."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser

from autotune.cli import main
from tests.programs.browser import LAPTOP, PHONE, opened
from tests.values.parameters import parameters

CHARTS = {
    *("causes", "step-before", "step-after", "ranks", "memory-before", "memory-after", "layers", "packs", "balance"),
    *("history", "importance", "failures", "pareto"),
}
MARKS = """() => Object.fromEntries([...document.querySelectorAll('.plot')].map(plot => [plot.id.slice(6),
  [...plot.querySelectorAll('.role-mark path, .role-mark line, .role-mark text')].filter(mark => {
    const box = mark.getBoundingClientRect(); return box.width + box.height > 0 }).length]))"""
OUTSIDE = """() => [...document.querySelectorAll('.plot svg')].filter(svg => {
  const all = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].some(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < all.left - 1 || box.right > all.right + 1) }) }).map(svg => svg.parentElement.id)"""
OVERLAPS = """() => [...document.querySelectorAll('.plot svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].filter(text => text.getAttribute('opacity') !== '0')
    .map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
  const before = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 1;
  const apart = (a, b) => before(a, b) || before(b, a);
  return texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([, b]) => !apart(a, b))
    .map(([other]) => [svg.parentElement.id, one, other])) })"""
CONTRASTS = """() => {
  const linear = part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
  const luminance = name => {
    const place = document.createElement('span');
    place.style.color = `var(--${name})`;
    document.body.append(place);
    const [r, g, b] = getComputedStyle(place).color.match(/[\\d.]+/g).map(part => linear(part / 255));
    place.remove();
    return .2126 * r + .7152 * g + .0722 * b };
  const contrast = (one, other) => { const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (a + .05) / (b + .05) };
  const texts = ['ink', 'muted', 'link'].flatMap(text => ['paper', 'panel'].map(under => contrast(text, under)));
  const colours = ['blue', 'orange', 'green', 'purple', 'yellow', 'red', 'grey', 'pink', 'brown'];
  return [Math.min(...texts), Math.min(...colours.map(colour => contrast(colour, 'paper')))] }"""
FILLS = "getComputedStyle(document.querySelector('#chart-failures .mark-rect path')).fill"


@pytest.mark.parametrize(
    "options",
    parameters({"light": LAPTOP, "dark": {**LAPTOP, "color_scheme": "dark"}, "phone": PHONE}, short=("dark", "phone")),
)
def test_every_chart_is_drawn_without_a_message_or_a_request(
    browser: Browser, report: Path, options: dict[str, Any]
) -> None:
    with opened(browser, report, **options) as found:
        assert found.said == []
        assert found.asked == [report.as_uri()]
        marks = found.value(MARKS)
        assert marks.keys() == CHARTS
        assert min(marks.values()) > 0, marks
        assert marks["step-before"] > 8  # passes of four micro-batches, and their numbers
        assert found.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert found.value(OUTSIDE) == []
        assert found.value(OVERLAPS) == []
        texts, colours = found.value(CONTRASTS)
        assert texts >= 4.5  # WCAG 2.2, 1.4.3
        assert colours >= 2.3


def test_light_dark_and_print_have_their_own_colours(browser: Browser, report: Path) -> None:
    with opened(browser, report, **LAPTOP) as found:
        light = found.value(FILLS), found.value("getComputedStyle(document.body).backgroundColor")
    with opened(browser, report, **LAPTOP, color_scheme="dark") as found:
        dark = found.value(FILLS), found.value("getComputedStyle(document.body).backgroundColor")
        found.page.emulate_media(media="print")
        printed = found.value(FILLS), found.value("getComputedStyle(document.body).backgroundColor")
        pages = re.findall(rb"/Type\s*/Page\b", found.page.pdf(format="A4"))
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert printed == light
    assert 3 <= len(pages) <= 14


def test_the_page_can_be_read_without_seeing_it_and_used_by_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report, **LAPTOP) as found:
        page = found.page
        assert [page.locator(name).count() for name in ("html[lang=en]", "header", "nav", "main", "footer", "h1")] == [
            1
        ] * 6
        assert not found.value(
            "[...document.querySelectorAll('[id]')].some((e, i, all) => all.some(o => o !== e && o.id === e.id))"
        )
        for figure in page.locator("figure").all():
            label = figure.locator("[role=img]:has(> .plot)").get_attribute("aria-label") or ""
            assert len(label) > 40
            assert figure.locator("details table tbody tr").count() > 0
            assert figure.locator("th[scope=col]").count() > 1
        page.keyboard.press("Tab")
        assert found.value("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert found.value("document.activeElement.closest('main') !== null")
        summary = page.locator("#step summary").first
        summary.focus()
        page.keyboard.press("Enter")
        assert page.locator("#step details[open] table").first.is_visible()


def test_a_pass_can_be_selected_and_explains_itself(browser: Browser, report: Path) -> None:
    opacities = (
        "[...document.querySelectorAll('#chart-step-before .mark-rect path')].map(mark => mark.getAttribute('opacity'))"
    )
    with opened(browser, report, **LAPTOP) as found:
        mark = found.page.locator("#chart-step-before .mark-rect path").first
        mark.hover()
        found.page.wait_for_selector("#vg-tooltip-element.visible")
        assert "micro-batch" in found.page.locator("#vg-tooltip-element").inner_text()
        assert set(found.value(opacities)) == {"1"}
        mark.click()
        found.page.wait_for_function(f"new Set({opacities}).size === 2")
        assert found.said == []


def test_the_names_of_baselines_that_are_equally_fast_do_not_overlap(
    browser: Browser, study_url: str, tmp_path: Path
) -> None:
    shutil.copy(study_url.removeprefix("sqlite:///"), tmp_path / "study.db")
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        (text,) = database.execute("SELECT baselines FROM autotune_best_plan").fetchone()
        first, *others = json.loads(text)
        speed = first["estimated_samples_per_second"]
        close = [
            {**first, "role": role, "estimated_samples_per_second": share * speed}
            for role, share in (("zero3", 1.001), ("hbp", 1.01), ("current-plan", 0.98), ("default-no-recompute", 0.6))
        ]
        database.execute("UPDATE autotune_best_plan SET baselines = ?", [json.dumps([first, *others, *close])])
    report = tmp_path / "report.html"
    answer = CliRunner().invoke(main, ["report", "--db", f"sqlite:///{tmp_path}/study.db", "--out", str(report)])
    assert answer.exit_code == 0, answer.output
    for options in (LAPTOP, PHONE):
        with opened(browser, report, **options) as found:
            assert found.value(OVERLAPS) == []
            shown = found.value("document.querySelector('#chart-history svg').textContent")
            assert all(role in shown for role in ("default", "zero3", "hbp", "current-plan", "default-no-recompute"))
