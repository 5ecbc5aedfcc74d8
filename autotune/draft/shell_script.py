"""Commands of a shell script, with its variables replaced. Nothing is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.draft.shell_arithmetic import computed
from autotune.draft.shell_branches import Branches
from autotune.draft.shell_conditions import TESTS, UNKNOWN, UNSET, matches, succeeds

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_PARAMETER = re.compile(rf"({_NAME}|\d)(\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(\(|\$\(|\$\{|`")
_HERE_DOCUMENT = re.compile(r"(<<-?\s*(['\"]?)(\w+)\2[^\n]*\n)(?:.*?\n)??[ \t]*\3[ \t]*(?=\n|$)", re.DOTALL)
_CLOSING = {"$((": "))", "$(": ")", "${": "}", "`": "`"}
_ENDS = ";|&()\n"
_SEPARATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]|$")
_CASE_ENDS = (";;", ";&", ";;&")
_PREFIXES = {"export", "local", "exec", "time", "nohup", "env", "sudo", "eval"}
_OPENING, _CLOSING_KINDS = (
    {"if", "for", "select", "while", "until", "case", "{"},
    {"fi": "if", "done": "loop", "esac": "case", "}": "{"},
)
_KEYWORDS = {*_PREFIXES, *_OPENING, *_CLOSING_KINDS, "then", "elif", "else", "do"}
_KEYWORD = re.compile(r"[a-z]+(?=[\s;|&)]|$)|[{}](?=[\s;|&)]|$)")
# A choice, as long as the largest script that is read: a loop that doubles a variable would fill the memory.
_LONGEST = 1 << 20
_NEXT = "\1"
"""Separates the words of a list in its value."""


@dataclass(frozen=True, slots=True)
class NoValue:
    """A word whose value depends on something that the script does not set."""

    start: str = ""
    """The part of the word before it, such as `--option=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A command without its redirections."""

    words: tuple[str | NoValue, ...]
    variables: Mapping[str, str | NoValue]
    """Variables of the script when it runs, those of its environment included."""
    line: int
    unfollowed: tuple[int, ...] = ()
    """Lines of the tests and loops that decide whether it runs, where only a run of the script can say."""
    exported: frozenset[str] = frozenset()
    """Names of the variables that stand before it or are exported: its own environment."""
    doubts: Mapping[str, int] = field(default_factory=dict)
    """Line of such a test or loop by the variable that has no value because of it."""


def commands_of(text: str) -> Iterator[ShellCommand]:
    """Yield the commands. Raise ValueError for quotes that do not end, and for what grows without an end."""
    lines = re.sub(rf"[{UNSET}{_NEXT}]", "", text.replace("\r\n", "\n"))
    variables: dict[str, str] = {}
    try:
        # Lines of a here-document stay, empty, so that those after it keep their numbers.
        whole = _HERE_DOCUMENT.sub(lambda found: found[1] + "\n" * (found[0].count("\n") - found[1].count("\n")), lines)
        yield from _Reader(whole, variables, Branches(variables)).commands()
    except RecursionError as error:
        raise ValueError("its commands are nested too deeply") from error


class _Reader:
    """A text of the script that is read once, from its start to its end."""

    def __init__(
        self, text: str, variables: dict[str, str], branches: Branches, line: int = 1, exported: set[str] | None = None
    ) -> None:
        self._text = text
        self._at = 0
        self._variables = variables
        self._branches = branches
        self._words: list[str] = []
        self._word: str | None = None
        self._before: dict[str, str] = {}  # variables before the present command
        self._assigned: set[str] = set()  # by the present command
        self._exported = set() if exported is None else exported
        self._line, self._counted = line, 0

    def commands(self) -> Iterator[ShellCommand]:
        """Yield the commands, and keep what they assign."""
        while self._at < len(self._text):
            yield from self._command()

    def _command(self) -> Iterator[ShellCommand]:
        self._begin()
        keyword = self._start()
        line = self._line_here()
        own = {name: self._variables[name] for name in self._assigned}
        self._branches.become(self._before)  # words do not see the assignments before them
        while self._at < len(self._text) and (self._text[self._at] not in _ENDS or self._is_in_test()):
            self._next_word()
        words, self._words = self._words, []
        if not words or keyword in ("export", "local", "eval"):  # else they count for this command alone
            self._variables.update(own)
        success: bool | None = True
        if words and self._branches.runs is not False:
            if keyword == "eval":
                yield from _Reader(" ".join(words), self._variables, self._branches, line, self._exported).commands()
                success = None
            else:
                yield self._found(words, line, own)
                success = succeeds(words)
        if keyword == "export":
            self._exported |= {*self._assigned, *words}
        self._end(success, line, is_empty=not words and not self._assigned)

    def _found(self, words: list[str], line: int, own: Mapping[str, str]) -> ShellCommand:
        known = {name: _word(value) for name, value in {**self._variables, **own}.items()}
        return ShellCommand(
            words=tuple(map(_word, words)),
            variables=known,
            line=line,
            unfollowed=self._branches.unfollowed(line),
            exported=frozenset(self._exported | own.keys()),
            doubts={name: at for name, at in self._branches.doubts.items() if isinstance(known.get(name), NoValue)},
        )

    def _begin(self) -> None:
        self._assigned = set()
        self._before = dict(self._variables)

    def _end(self, success: bool | None, line: int, *, is_empty: bool) -> None:
        """Read what ends the command, and give the variables their values after it."""
        separator = _SEPARATOR.match(self._text, self._at)
        end = separator[0] if separator else ""
        self._at += max(1, len(end))
        branches = self._branches
        if branches.follows is not True and not is_empty:
            branches.merge([self._before, *([] if branches.follows is False else [dict(self._variables)])], line)
        joins = end if end in ("&&", "||") else ""
        if is_empty:
            # A line may end behind an operator.
            if end not in ("\n", "("):
                branches.join(joins)
        elif end not in ("|", "|&"):  # of a pipeline, the last command decides
            branches.after(success, joins)
        if end == "(":
            branches.begin("(", line)
        elif end == ")":
            branches.end("(")
        elif end in _CASE_ENDS and branches.case_of() is not None:
            branches.end_branch("case")
            self._pattern()

    def _start(self) -> str:
        """Read keywords and assignments before a command; return the last keyword."""
        keyword = ""
        while True:
            self._skip_blanks()
            if assigned := _ASSIGNMENT.match(self._text, self._at):
                self._assign(assigned)
                continue
            word = _KEYWORD.match(self._text, self._at)
            if word is None or word[0] not in _KEYWORDS:
                return keyword
            line = self._line_here()
            self._at, keyword = word.end(), word[0]
            if keyword not in _PREFIXES:
                self._structure(keyword, line)
                self._begin()

    def _structure(self, keyword: str, line: int) -> None:
        """Read a keyword of a compound command, and what belongs to it."""
        branches = self._branches
        if keyword in ("for", "select"):
            self._loop(line)
        elif keyword == "case":
            self._skip_blanks()
            branches.begin("case", line, self._value())
            self._skip_blanks("\n")
            self._at += 2 * self._text.startswith("in", self._at)
            self._pattern()
        elif keyword in _OPENING:
            kind = "loop" if keyword in ("while", "until") else keyword
            branches.begin(kind, line)
            if kind != "if":
                branches.branch(kind, None if kind == "loop" else True)
        elif keyword == "then":
            branches.branch("if", branches.success)
        elif keyword in ("elif", "else"):
            branches.end_branch("if")
            if keyword == "else":
                branches.branch("if", condition=True)
        elif keyword in _CLOSING_KINDS:
            branches.end(_CLOSING_KINDS[keyword])

    def _loop(self, line: int) -> None:
        """Begin a loop over words; its variable has a value where it is over one."""
        self._skip_blanks()
        self._branches.begin("loop", line)
        name = re.compile(_NAME).match(self._text, self._at)
        if name is None:  # for ((...))
            self._branches.branch("loop", None)
            return
        self._at = name.end()
        self._skip_blanks("\n")
        values: list[str] = []
        if over := re.compile(r"in(?=\s)").match(self._text, self._at):
            self._at = over.end()
            self._skip_blanks()
            while self._at < len(self._text) and self._text[self._at] not in _ENDS:
                self._next_word()
            values, self._words = self._words, []
        is_one = len(values) == 1 and not re.search(rf"[*?\[{{{UNKNOWN}]", values[0])
        self._branches.branch("loop", True if is_one else None)
        self._variables[name[0]] = values[0] if is_one else UNKNOWN

    def _pattern(self) -> None:
        """Read the patterns before the next branch of a `case`, if there is one."""
        blanks = re.compile(r"(?:\s|#[^\n]*\n)*").match(self._text, self._at)
        self._at = blanks.end() if blanks else self._at
        end = self._text.find(")", self._at)
        if end < 0 or re.compile(r"esac\b").match(self._text, self._at):
            return
        patterns, self._at = self._text[self._at : end].lstrip("("), end + 1
        self._branches.branch("case", matches(self._branches.case_of() or "", patterns))

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = max(self._at, self._counted)
        return self._line

    @property
    def _test(self) -> str:
        """The test that the present command is; empty for another one."""
        first = self._words[1:2] if self._words[:1] == ["!"] else self._words[:1]
        return first[0] if first and first[0] in TESTS else ""

    def _is_in_test(self) -> bool:
        """Return whether the command is a `[[` that is open, where `&&` and `||` end nothing."""
        return self._test == "[[" and self._words[-1] != "]]" and self._text[self._at] not in ";\n"

    def _assign(self, assigned: re.Match[str]) -> None:
        name, adds = assigned.groups()
        self._at = assigned.end()
        self._assigned.add(name)
        is_array = self._text.startswith("(", self._at)
        value = _NEXT.join(self._array()) if is_array else self._value()
        before = self._variables.get(name, "") if adds else ""
        if len(before) + len(value) > _LONGEST:
            raise ValueError(f"the variable {name} is too long")
        self._variables[name] = before + _NEXT * bool(is_array and before) + value

    def _array(self) -> list[str]:
        self._at += 1
        outer, self._words = self._words, []
        while not self._text.startswith(")", self._at):
            if self._at >= len(self._text):
                raise ValueError("a list in brackets does not end")
            before = self._at
            self._next_word()
            self._skip_blanks("\n")
            self._at += self._at == before  # at a character that has no place in a list
        self._at += 1
        values, self._words = self._words, outer
        return values

    def _value(self) -> str:
        """Read one word that is not split, as in an assignment."""
        outer, self._words, self._word = self._words, [], ""
        self._read_word(splits=False)
        self._end_word()
        values, self._words = self._words, outer
        return " ".join(values)

    def _next_word(self) -> None:
        """Read a word, a comment or a redirection, and the blanks behind it."""
        rest = self._text[self._at : self._at + 12]
        if self._is_in_test() and (operator := re.match(r"&&|\|\||[&|()<>]", rest)):
            self._words.append(operator[0])
            self._at += operator.end()
            self._skip_blanks("\n")
        elif rest.startswith("#"):
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif redirection := re.match(r"\d*[<>][<>&|]*", rest):
            self._at += redirection.end()
            self._skip_blanks()
            self._value()
        else:
            self._read_word(splits=True)
            self._end_word()
        self._skip_blanks()

    def _read_word(self, *, splits: bool) -> None:
        while self._at < len(self._text) and (character := self._text[self._at]) not in f" \t<>{_ENDS}":
            if character == "\\":
                self._add(self._text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif character in "'\"":
                self._quoted(character)
            elif (value := self._expansion()) is None:
                # An open pattern in a test is not followed.
                self._add(UNKNOWN if character in "*?[" and self._test else character)
                self._at += 1
            elif self._test == "[[":  # which splits no values, and takes them for patterns
                self._add(UNKNOWN if re.search(r"[*?\[]", value) else value)
            else:
                self._split(value) if splits else self._add(value)

    def _quoted(self, quote: str) -> None:
        start = self._at
        self._add("")
        self._at += 1
        while not self._text.startswith(quote, self._at):
            if self._at >= len(self._text):
                raise ValueError(f"a quote does not end ({self._text[start:].split(chr(10))[0].strip()[:60]!r})")
            if quote == '"' and (value := self._expansion()) is not None:
                self._add(value)
                continue
            escaped = self._text[self._at + 1 : self._at + 2]
            if quote == '"' and self._text[self._at] == "\\" and escaped and escaped in '"$`\\\n':
                self._add(escaped.replace("\n", ""))
                self._at += 2
                continue
            self._add(self._text[self._at])
            self._at += 1
        self._at += 1

    def _expansion(self) -> str | None:
        """Read the expansion that begins here and return its value; None where none begins."""
        if found := _SUBSTITUTION.match(self._text, self._at):
            return self._substitution(found[0])
        if found := re.compile(rf"\$({_NAME}|[\d@*#?!$-])").match(self._text, self._at):
            self._at = found.end()
            return self._variables.get(found[1], UNSET if found[1].isalnum() or "_" in found[1] else UNKNOWN)
        return None

    def _substitution(self, opening: str) -> str:
        inner = self._enclosed(opening)
        if opening == "${":
            parameter = _PARAMETER.fullmatch(inner)
            if parameter is None:
                return UNKNOWN
            name, elements, default = parameter.groups()
            if default is None:
                value = self._variables.get(name, UNSET)
                return value.replace(_NEXT, " ") if elements == "[*]" else value
            return self._variables.get(name) or self._whole(default)
        if opening != "$((" and not inner.startswith("expr "):
            return UNKNOWN
        number = computed(inner.removeprefix("expr ").replace("\\*", "*"), self._variables)
        return UNKNOWN if number is None else str(number)

    def _whole(self, text: str) -> str:
        """Return a text as one word."""
        reader = _Reader(text, self._variables, self._branches)
        reader._word = ""
        while reader._at < len(text):
            reader._read_word(splits=False)
            reader._add(text[reader._at : reader._at + 1])
            reader._at += 1
        return reader._word

    def _enclosed(self, opening: str) -> str:
        """Read to the bracket that belongs to the opening one, and return what is between them."""
        start = self._at = self._at + len(opening)
        depth, closing = 0, _CLOSING[opening]
        while depth or not self._text.startswith(closing, self._at):
            if self._at >= len(self._text):
                raise ValueError(f"{opening} does not end ({self._text[start : start + 40]!r})")
            character = self._text[self._at]
            depth += (character == opening[-1]) - (character == closing[-1])
            self._at += 1
        self._at += len(closing)
        return self._text[start : self._at - len(closing)]

    def _add(self, text: str) -> None:
        for at, piece in enumerate(text.split(_NEXT)):
            if at:
                self._end_word()
            self._word = (self._word or "") + piece

    def _split(self, value: str) -> None:
        for piece in re.split(rf"([\s{_NEXT}]+)", value):
            if not piece.strip(f"{_NEXT} \t\n"):
                self._end_word()
            else:
                self._add(piece)

    def _end_word(self) -> None:
        if self._word is not None:
            self._words.append(self._word)
        self._word = None

    def _skip_blanks(self, more: str = "") -> None:
        blanks = re.compile(rf"(?:[ \t{more}]|\\\n)*").match(self._text, self._at)
        self._at = blanks.end() if blanks else self._at


def _word(text: str) -> str | NoValue:
    start, unknown, _ = text.partition(UNKNOWN)
    return NoValue(start) if unknown else text
