"""Agents of other processes, for messages."""

from collections.abc import Mapping

from autotune.machine.agent import has_died, lives
from storage.records import AgentRecord, LaunchRecord


def living(launch: LaunchRecord, agents: Mapping[str, AgentRecord]) -> AgentRecord | None:
    """Return the agent that runs the launch, or None if it is known to have ended."""
    agent = agents.get(launch.agent_id or "")
    return None if agent is None or has_died(agent) else agent


def place(agent: AgentRecord) -> str:
    """Describe the process of an agent, and since when it sent no heartbeat."""
    where = f"process {agent.process.partition(' ')[0]} on {agent.machine.partition(' ')[0]}"
    silence = silent_minutes(agent)
    return f"{where}, silent for {silence} min" if silence else where


def silent_minutes(agent: AgentRecord) -> int:
    """Return the minutes since the last heartbeat; 0 for a process that is seen to run on this host."""
    return 0 if lives(agent) else int((agent.silent_seconds or 0) // 60)
