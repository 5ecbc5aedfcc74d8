"""Branches of a shell script, and the variables on whose values those agree of which one may run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.draft.shell_conditions import UNKNOWN, both, either, negated


@dataclass(slots=True, kw_only=True)
class _Compound:
    """A compound command that is open: an `if`, a loop, a `case`, or commands in brackets."""

    kind: str
    line: int
    runs: bool | None
    """Whether it runs at all."""
    start: dict[str, str]
    """Variables before each of its branches."""
    operator: str
    """The one of `&&` and `||` before it, if any."""
    success: bool | None
    """Whether what stands before the operator succeeded."""
    subject: str = ""
    """The text of a `case`."""
    branch: bool | None = True
    """Whether the present branch runs, if the compound does."""
    taken: bool | None = False
    """Whether one of the branches until now was to run."""
    ends: list[dict[str, str]] = field(default_factory=list)
    """Variables after each branch that may have run."""


class Branches:
    """Whether the present command runs, and what its variables are after it."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._open: list[_Compound] = []
        self._operator = ""
        self.success: bool | None = True
        """Whether the last commands, joined by `&&` and `||`, succeeded; None where that is not known."""
        self.doubts: dict[str, int] = {}
        """Line of the test or loop by the variable that has no value since then."""

    @property
    def follows(self) -> bool | None:
        """Whether the next command runs after those before it in `A && B` or `A || B`."""
        return {"&&": self.success, "||": negated(self.success)}.get(self._operator, True)

    @property
    def runs(self) -> bool | None:
        """Whether the next command runs."""
        found = self.follows
        for compound in self._open:
            found = both(found, both(compound.runs, compound.branch))
        return found

    def unfollowed(self, line: int) -> tuple[int, ...]:
        """Return the lines of what decides on the next command, which is in `line`, and is not followed."""
        around = [each.line for each in self._open if both(each.runs, each.branch) is None]
        return (*around, *([line] if self.follows is None else []))

    def begin(self, kind: str, line: int, subject: str = "") -> None:
        """Open a compound command."""
        self._open.append(
            _Compound(
                kind=kind,
                line=line,
                runs=self.follows,
                start=dict(self._variables),
                operator=self._operator,
                success=self.success,
                subject=subject,
            )
        )
        self._operator, self.success = "", True

    def branch(self, kind: str, condition: bool | None) -> None:
        """Begin a branch that runs on a condition, unless an earlier one did."""
        if compound := self._innermost(kind):
            compound.branch = both(negated(compound.taken), condition)
            compound.taken = either(compound.taken, condition)
            compound.start = dict(self._variables)  # with what the condition assigned
            self._operator = ""

    def end_branch(self, kind: str) -> None:
        """End the present branch, if one is open."""
        if compound := self._innermost(kind):
            if both(compound.runs, compound.branch) is not False:
                compound.ends.append(dict(self._variables))
            self.become(compound.start)
            # What follows up to the next branch, the condition of `elif`, runs where none was taken.
            compound.branch = negated(compound.taken)
            self._operator = ""

    def case_of(self) -> str | None:
        """Return the text of the open `case`, None where none is."""
        compound = self._innermost("case")
        return compound.subject if compound else None

    def end(self, kind: str) -> None:
        """Close a compound command, and give the variables the values on which all ways through it agree."""
        if (compound := self._innermost(kind)) is None:
            return
        if kind == "(":  # a shell of its own
            self.become(compound.start)
        else:
            self.end_branch(kind)
            if both(compound.runs, compound.taken) is not True:
                compound.ends.append(compound.start)
            self.merge(compound.ends, compound.line)
        self._open.pop()
        self._operator, self.success = compound.operator, compound.success
        self.after(None, "")

    def after(self, success: bool | None, operator: str) -> None:
        """Count a command whose success is this; `operator` stands behind it."""
        joined = {"&&": both, "||": either}.get(self._operator)
        self.success = joined(self.success, success) if joined else success
        self._operator = operator

    def join(self, operator: str) -> None:
        """Take an operator behind a compound command."""
        self._operator = operator

    def merge(self, ways: Sequence[dict[str, str]], line: int) -> None:
        """Give the variables the values on which these ways agree; the others have none, because of this line."""
        names = {name for way in ways for name in way}
        merged = {}
        for name in names:
            values = {way.get(name, UNKNOWN) for way in ways}
            merged[name] = values.pop() if len(values) == 1 else UNKNOWN
            if values:
                self.doubts[name] = line
        self.become(merged)

    def _innermost(self, kind: str) -> _Compound | None:
        """Return the innermost compound of a kind, without those inside it, which text that is no command left open."""
        kinds = [each.kind for each in self._open]
        if kind not in kinds:
            return None
        at = len(kinds) - kinds[::-1].index(kind)
        del self._open[at:]
        return self._open[-1]

    def become(self, variables: dict[str, str]) -> None:
        """Give all variables these values, in place, since readers of other texts share them."""
        values = dict(variables)
        self._variables.clear()
        self._variables.update(values)
