"""The server of the Model Context Protocol on stdin and stdout. The protocol's library sends other output to stderr."""

import asyncio
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from typing import Any

import anyio
import click
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

import autotune
from autotune.cli import os_errors
from autotune.cli.assistants.provenance import SCHEMA, answer
from autotune.cli.assistants.tools import CommandTool, check_settings
from autotune.cli.context import document_text
from autotune.cli.parameters import DefaultGroup
from autotune.cli.visible import visible
from trials.errors import AutotuneError

LOOKS = ("recommend", "doctor", "pack", "predict", "plans", "show", "compare", "studies")
"""Commands that run nothing on the devices, but `doctor`, which may try single layers of a job for some seconds."""
RUNS = ("tune", "launch")
_SHOWN_LINES = 20
_MOST_OF_A_LINE = 1 << 24
"""Bytes: a choice far above any message. A longer line would end the run."""
_WARNING = "WARNING: "
_INSTRUCTIONS = (
    "autotune finds the fastest plan to train a vision-language model. Without a device begin with `recommend`; with a "
    "profile of a device ask `predict`; `plans` lists what searches have measured. Each result says in `provenance` "
    "where its numbers come from: tell the user, too. Paths are relative to the folder in which the server was started."
)
_Report = Callable[[str], Coroutine[Any, Any, None]]


def serve(commands: Mapping[str, click.Command], database: str | None, *, allows_runs: bool) -> None:
    """Serve one client until it closes stdin; a run of its that has not ended is ended, and what it measured kept."""
    anyio.run(ToolServer(commands, database, allows_runs=allows_runs).serve)


class ToolServer:
    """The tools that one client sees, and their calls."""

    def __init__(self, commands: Mapping[str, click.Command], database: str | None, *, allows_runs: bool) -> None:
        self._tools = {name: CommandTool(name=name, command=_leaf(commands[name])) for name in (*LOOKS, *RUNS)}
        self._allows_runs = allows_runs
        self._offered = (*LOOKS, *RUNS) if allows_runs else LOOKS
        self._database = database
        self._one_at_a_time = anyio.CapacityLimiter(1)  # commands expect a process of their own

    async def serve(self) -> None:
        server = Server(
            "autotune",
            version=autotune.__version__,
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        async with stdio_server() as (requests, answers):
            await server.run(requests, answers, server.create_initialization_options())

    async def _list(self, _: ServerRequestContext, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_described(self._tools[name]) for name in self._offered])

    async def _call(self, context: ServerRequestContext, params: CallToolRequestParams) -> CallToolResult:
        number = count(1)

        async def report(text: str) -> None:
            await context.session.report_progress(next(number), message=visible(text))

        try:
            found = await self._answer(params.name, params.arguments or {}, report)
            return _text(document_text(found, indent=None), structured_content=found)
        except (AutotuneError, click.ClickException, OSError) as error:
            return _text(_message(error), is_error=True)

    async def _answer(self, name: str, arguments: Mapping[str, Any], report: _Report) -> dict[str, Any]:
        if name not in self._tools:
            raise AutotuneError(f"there is no tool {name!r}; there are {', '.join(self._offered)}")
        tool = self._tools[name]
        line = tool.command_line(arguments)
        if name not in self._offered:
            raise AutotuneError(_refusal(tool, line))
        if not self._allows_runs:
            check_settings(map(str, arguments.get("set") or ()))
        if name in RUNS and not arguments.get("dry_run"):
            return await self._run(tool, line, report)
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            asyncio.run_coroutine_threadsafe(report(text), loop)

        return await anyio.to_thread.run_sync(
            lambda: tool.call(line, self._database, tell, allows_runs=self._allows_runs),
            limiter=self._one_at_a_time,  # held until the command ends, also where the call is cancelled before
        )

    async def _run(self, tool: CommandTool, line: list[str], report: _Report) -> dict[str, Any]:
        """Run the command in a process of its own, which a cancelled call interrupts as Ctrl-C does."""
        command = (sys.executable, "-P", "-m", "autotune", "--json", tool.name, *line)
        # Not on the command line, which every user of the machine can read: it may hold a password.
        database = {} if self._database is None else {"AUTOTUNE_DB_URL": self._database}
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **database},
                limit=_MOST_OF_A_LINE,
            )
            assert process.stderr is not None
            written = list[str]()
            try:
                async for each in process.stderr:
                    written.append(each.decode(errors="replace").rstrip("\n"))
                    await report(written[-1])
                await process.wait()
            finally:
                if process.returncode is None:
                    await _ended(process)
            if process.returncode:
                raise AutotuneError(_failure(written))
            output.seek(0)
            notes = [each.removeprefix(_WARNING) for each in written if each.startswith(_WARNING)]
            return answer(tool.name, json.loads(output.read()), notes)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a command politely, which takes the time of a checkpoint at most."""
    process.terminate()
    with anyio.CancelScope(shield=True):
        await process.communicate()  # reads on, since it could wait for room in the pipe


def _leaf(command: click.Command) -> click.Command:
    """Return the command itself, or the default one of a group."""
    return command.commands[command.default] if isinstance(command, DefaultGroup) else command


def _described(tool: CommandTool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.schema,
        output_schema=SCHEMA,
        annotations=ToolAnnotations(read_only_hint=tool.name in LOOKS, open_world_hint=False),
    )


def _text(text: str, **fields: Any) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)], **fields)


def _message(error: AutotuneError | click.ClickException | OSError) -> str:
    match error:
        case click.ClickException():
            return visible(error.format_message())
        case OSError():
            return visible(os_errors.message(error))
    return visible(str(error))


def _refusal(tool: CommandTool, line: list[str]) -> str:
    command = shlex.join(["autotune", tool.name, *line])
    return (
        f"{tool.name} uses the devices, and this server was started without --allow-runs; ask the user to run "
        f"`{command}`, or to start the server as `autotune mcp --allow-runs`. Possible without a run: `predict` from a "
        "profile, and `recommend` from data sheets"
    )


def _failure(written: list[str]) -> str:
    """Return the message of a command that has failed, or its last lines."""
    _, *messages = re.split(r"^Error: ", "\n".join(written), flags=re.MULTILINE)
    return messages[-1] if messages else "\n".join(written[-_SHOWN_LINES:])
