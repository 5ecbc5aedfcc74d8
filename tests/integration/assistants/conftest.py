"""An assistant that asks `autotune mcp` over pipes, by the client of the protocol's own package."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.types import CallToolResult, TextContent

from storage.store import open_store
from tests.values.storage import (
    EXPLANATION,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    concluded,
    launch_result,
    packed_plan,
    result_of,
    window_of,
)
from tests.values.training import job_of


class Assistant:
    """An assistant that is connected to a server."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self.portal = portal
        self.client = client

    def ask(self, tool: str, **arguments: object) -> CallToolResult:
        return self.begin(tool, arguments).result()

    def begin(self, tool: str, arguments: dict[str, Any], heard: ProgressFnT | None = None) -> Future[CallToolResult]:
        """Call a tool, of which the client may hear before the result is there, and which it may cancel."""
        call = partial(self.client.call_tool, tool, arguments, progress_callback=heard)
        return self.portal.start_task_soon(call)

    def answered(self, tool: str, **arguments: object) -> dict[str, Any]:
        return told_by(self.ask(tool, **arguments))

    def refused(self, tool: str, **arguments: object) -> str:
        answer = self.ask(tool, **arguments)
        assert answer.is_error
        return text_of(answer)


def told_by(answer: CallToolResult) -> dict[str, Any]:
    assert not answer.is_error, answer.content
    assert answer.structured_content is not None
    answered: dict[str, Any] = answer.structured_content
    assert json.loads(text_of(answer)) == answered
    return answered


def text_of(answer: CallToolResult) -> str:
    (content,) = answer.content
    assert isinstance(content, TextContent)
    return content.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a user")


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    """Environment of a user whose database holds a finished study, which tried two plans, and a training."""
    url = f"sqlite:///{folder}/known.db"
    with open_store(url) as store:
        study = store.create_study(store.add_workload(WORKLOAD), {"trials": 24}, seed=7)
        for plan in (packed_plan(), PADDED_PLAN):
            for outcome in ("completed", "out of memory"):
                store.finish_trial(result_of(store.start_trial(study.id, plan, "sampled").id, OUTCOMES[outcome]))
        concluded(store, best_of(study.id, explanation=EXPLANATION))
        launch = store.start_launch(packed_plan(), study.workload_fingerprint, 8.0).id
        store.add_window(window_of(launch))
        store.finish_launch(launch_result(launch))
    home = {name: str(folder / name) for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return {**os.environ, **home, "CUDA_VISIBLE_DEVICES": "", "AUTOTUNE_DB_URL": url}


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def connected(
    portal: BlockingPortal, environment: Mapping[str, str], *options: str, program: tuple[str, ...] = ("-m", "autotune")
) -> Iterator[Assistant]:
    arguments = ["-P", *program, "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(environment))
    with portal.wrap_async_context_manager(Client(stdio_client(server))) as client:
        yield Assistant(portal, client)


@pytest.fixture(scope="module")
def reader(portal: BlockingPortal, environment: dict[str, str]) -> Iterator[Assistant]:
    yield from connected(portal, environment)


@pytest.fixture(scope="module")
def runner(portal: BlockingPortal, environment: dict[str, str]) -> Iterator[Assistant]:
    yield from connected(portal, environment, "--allow-runs")


@pytest.fixture(scope="module")
def job(example: Path, folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_of(example, folder / "output").model_dump(mode="json", exclude_none=True)))
    return path
