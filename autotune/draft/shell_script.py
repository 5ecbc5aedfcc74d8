"""Commands of a shell script, with its variables replaced. Nothing is run."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_PARAMETER = re.compile(rf"({_NAME})(\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(\(|\$\(|\$\{|`")
_HERE_DOCUMENT = re.compile(r"(<<-?\s*(['\"]?)(\w+)\2[^\n]*\n)(?:.*?\n)??[ \t]*\3[ \t]*(?=\n|$)", re.DOTALL)
_CLOSING = {"$((": "))", "$(": ")", "${": "}", "`": "`"}
_ENDS = ";|&()\n"
_PREFIXES = {"export", "local", "exec", "time", "nohup", "env", "sudo", "eval", "then", "do", "else", "{", "}", "fi"}
# A choice, as long as the largest script that is read: a loop that doubles a variable would fill the memory.
_LONGEST = 1 << 20
_UNKNOWN = "\0"
"""Stands in a text for what the script does not set."""
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


def commands_of(text: str) -> Iterator[ShellCommand]:
    """Yield the commands. Raise ValueError for quotes that do not end, and for what grows without an end."""
    lines = text.replace("\r\n", "\n").replace(_UNKNOWN, "").replace(_NEXT, "")
    try:
        yield from _Reader(_HERE_DOCUMENT.sub(r"\1", lines), {}).commands()
    except RecursionError as error:
        raise ValueError("its commands are nested too deeply") from error


class _Reader:
    """A text of the script that is read once, from its start to its end."""

    def __init__(self, text: str, variables: dict[str, str]) -> None:
        self._text = text
        self._at = 0
        self._variables = variables
        self._words: list[str] = []
        self._word: str | None = None
        self._branches: list[bool | None] = []
        """Whether the present branch of each open `if` runs, None where that is not known."""

    def commands(self) -> Iterator[ShellCommand]:
        """Yield the commands, and keep what they assign."""
        while self._at < len(self._text):
            yield from self._command()

    def _command(self) -> Iterator[ShellCommand]:
        keyword = self._start()
        while self._at < len(self._text) and self._text[self._at] not in _ENDS:
            self._next_word()
        self._at += 1
        words, self._words = self._words, []
        if keyword in ("if", "elif"):
            self._branches[-1] = _holds(words)
        elif words and False not in self._branches:
            if keyword == "eval":
                yield from _Reader(" ".join(words), self._variables).commands()
                return
            variables = {name: _word(value) for name, value in self._variables.items()}
            yield ShellCommand(words=tuple(map(_word, words)), variables=variables)

    def _start(self) -> str:
        """Read keywords and assignments before a command; return the last keyword."""
        keyword = ""
        while True:
            self._skip_blanks()
            if assigned := _ASSIGNMENT.match(self._text, self._at):
                self._assign(assigned)
                continue
            word = re.compile(r"[a-z]+(?=[\s;]|$)|[{}](?=\s|$)").match(self._text, self._at)
            if word is None or word[0] not in (*_PREFIXES, "if", "elif"):
                return keyword
            self._at, keyword = word.end(), word[0]
            self._branch(keyword)

    def _branch(self, keyword: str) -> None:
        if keyword == "if":
            self._branches.append(None)
        elif self._branches and keyword == "else":
            taken = self._branches[-1]
            self._branches[-1] = None if taken is None else not taken
        elif self._branches and keyword == "fi":
            self._branches.pop()

    def _assign(self, assigned: re.Match[str]) -> None:
        name, adds = assigned.groups()
        self._at = assigned.end()
        is_array = self._text.startswith("(", self._at)
        value = _NEXT.join(self._array()) if is_array else self._value()
        if False not in self._branches:
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
        if rest.startswith("#"):
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
                self._add(character)
                self._at += 1
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
            return self._variables.get(found[1], _UNKNOWN)
        return None

    def _substitution(self, opening: str) -> str:
        inner = self._enclosed(opening)
        if opening == "${":
            parameter = _PARAMETER.fullmatch(inner)
            if parameter is None:
                return _UNKNOWN
            name, elements, default = parameter.groups()
            if default is None:
                value = self._variables.get(name, _UNKNOWN)
                return value.replace(_NEXT, " ") if elements == "[*]" else value
            return self._variables.get(name) or self._whole(default)
        if opening != "$((" and not inner.startswith("expr "):
            return _UNKNOWN
        number = computed(inner.removeprefix("expr ").replace("\\*", "*"), self._variables)
        return _UNKNOWN if number is None else str(number)

    def _whole(self, text: str) -> str:
        """Return a text as one word."""
        reader = _Reader(text, self._variables)
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
    start, unknown, _ = text.partition(_UNKNOWN)
    return NoValue(start) if unknown else text


def _holds(test: list[str]) -> bool | None:
    """Return whether a test of texts holds; None for another test, or one of something unknown."""
    match test:
        case ["[" | "[[", *inner, "]" | "]]"] if not any(_UNKNOWN in word for word in inner):
            match inner:
                case ["-n", text]:
                    return bool(text)
                case ["-z", text]:
                    return not text
                case [left, "=" | "==", right]:
                    return left == right
                case [left, "!=", right]:
                    return left != right
    return None


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
# A choice: sizes and counts of a training have fewer digits, and products of such numbers are computed at once.
_MOST_DIGITS = 12


def computed(expression: str, variables: Mapping[str, str]) -> int | None:
    """Return the value of an expression, with variables as `NAME`, `$NAME` or `${NAME}`; None for any other."""
    names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression)
    numbers = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or name[0], names)
    try:
        return _value(ast.parse(numbers.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if len(str(value)) <= _MOST_DIGITS:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic")
