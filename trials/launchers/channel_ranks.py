"""Groups of ranks whose requests are channels: what the agent sends over them, and what the ranks have answered."""

from collections.abc import Set

from trials import channels
from trials.channels import Channel
from trials.tasks.answer import Answer, begun_name, read_report, report_name
from trials.tasks.request import Request, write_request
from trials.tasks.steering import StepVerdict, TimedStep, step_name, verdict_name
from trials.tasks.stop import Stop


class ChannelRanks:
    """The part of a `RankGroup` that is the same wherever the ranks are. Each request has a channel of its own."""

    _channel: Channel

    def __init__(self, world_size: int) -> None:
        self._ranks = {report_name(rank): rank for rank in range(world_size)}
        self._waiting = set[int]()
        """Ranks that have not begun with the last request."""
        self._answers: dict[int, Answer] = {}
        self._steps = 0

    def _exchange(self, channel: Channel, request: Request) -> None:
        """Write the request to its channel, from which the answers are read from now on."""
        self._channel, self._waiting, self._answers, self._steps = channel, set(self._ranks.values()), {}, 0
        write_request(channel, request)

    def begun(self) -> Set[int]:
        self._waiting = {rank for rank in self._waiting if not self._channel.written([begun_name(rank)])}
        return set(self._ranks.values()) - self._waiting

    def next_step(self) -> float | None:
        step = channels.receive(TimedStep, self._channel, step_name(self._steps + 1))
        if step is None:
            return None
        self._steps += 1
        return step.seconds

    def decide(self, *, go_on: bool) -> None:
        channels.send(self._channel, verdict_name(self._steps), StepVerdict(go_on=go_on))

    def stop(self, when: Stop) -> None:
        self._channel.put(when, "")

    def answers(self) -> dict[int, Answer]:
        missing = [name for name, rank in self._ranks.items() if rank not in self._answers]
        for rank in (self._ranks[name] for name in self._channel.written(missing)):
            answer = read_report(self._channel, rank)
            assert answer is not None, "it is written"
            self._answers[rank] = answer
        return dict(self._answers)
