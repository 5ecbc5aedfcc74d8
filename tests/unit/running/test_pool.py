"""When the pool starts new ranks: with processes that answer like ranks, and train nothing."""

import logging
import os
import sys
from pathlib import Path

import pytest

from tests.search_values import prepared_of
from tests.training_values import plan_of
from trials.run.pool import Answers, WarmPool
from trials.run.ranks import Command
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training

RANK = """
import os, sys
from pathlib import Path
from trials.tasks.answer import TrainingReport, write_report
kept = []
for line in sys.stdin:
    report = TrainingReport(steps=os.getpid(), finished=False, model=None, blank_samples=0)
    write_report(Path(line.rstrip("\\n")), 0, report)
    kept += [open(os.devnull) for _ in range(int(sys.argv[1]))]
"""


def processes(folder: Path, requests: int, *, leaked: int = 0, requests_per_start: int = 50) -> list[int]:
    """Which process served each request, numbered from 0 in order of appearance; each leaks some descriptors."""
    command = Command(
        argv=(sys.executable, "-c", RANK, str(leaked)), environment={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    request = prepared_of(folder).request(plan_of("4+4"), Training(output=folder))
    served: list[int] = []
    with WarmPool([command], folder, requests_per_start) as pool:
        for _ in range(requests):
            answer = pool.ask(request, 60)
            assert isinstance(answer, Answers), answer
            (report,) = answer.reports
            assert isinstance(report, TrainingReport)
            served.append(report.steps)
    order = list(dict.fromkeys(served))
    return [order.index(process) for process in served]


@pytest.mark.parametrize(("requests_per_start", "served_by"), [(50, [0, 0, 0]), (2, [0, 0, 1]), (1, [0, 1, 2])])
def test_ranks_serve_as_many_requests_as_they_are_given(
    tmp_path: Path, requests_per_start: int, served_by: list[int]
) -> None:
    assert processes(tmp_path, 3, requests_per_start=requests_per_start) == served_by


def test_ranks_that_leak_are_told_of_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert processes(tmp_path, 5, leaked=12) == [0, 0, 0, 1, 1]
    (record,) = caplog.records
    assert "rank 0 leaks" in record.getMessage()
    assert "after 3; new ranks" in record.getMessage()


def test_a_little_growth_is_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert processes(tmp_path, 3, leaked=8) == [0, 0, 0]
    assert not caplog.records
