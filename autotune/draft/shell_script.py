"""Words of the commands in a shell script, with its variables replaced. Nothing is run."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_MOST_DIGITS = 12
_ENDS = ";<>|&"
_PREFIXES = ("export", "local", "exec", "time", "nohup")


class NoValue:
    """A word whose value depends on something that the script does not set."""


def words_of(text: str) -> Iterator[list[str | NoValue]]:
    """Yield the words of each command, without redirections. Raise ValueError for quotes that do not end."""
    variables: dict[str, str | None] = {}
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        for words in _commands(_ARITHMETIC.sub(lambda found: _arithmetic(found[1], variables), line)):
            while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
                variables[assigned[1]] = _value(assigned[2], variables)
                words.pop(0)
            if words:
                values = (_value(word, variables) for word in words)
                yield [NoValue() if value is None else value for value in values]


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line; a redirection or `;` ends one."""
    # `shlex.split` would join `a;b` and `>log` to words; punctuation characters keep them apart.
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_ENDS)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set(_ENDS):
                yield words
                words = []
            elif word not in _PREFIXES or words:
                words.append(word)
    except ValueError as error:
        raise ValueError(f"a quote does not end ({line.strip()[:60]!r})") from error
    yield words


def _value(word: str, variables: dict[str, str | None]) -> str | None:
    """Return a word with its variables and arithmetic replaced, or None where one is not known."""
    missing = False

    def replaced(reference: re.Match[str]) -> str:
        nonlocal missing
        value = variables.get(reference[1] or reference[3])
        if value is None and reference[2] is not None:
            value = _value(reference[2], variables)
        missing |= value is None
        return value or ""

    value = _REFERENCE.sub(replaced, word)
    return None if missing or "$(" in value or "`" in value else value


def _arithmetic(expression: str, variables: dict[str, str | None]) -> str:
    """Return the number that a shell computes; leave an expression that cannot be computed here unchanged."""
    names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression)
    result = _number(re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or name[0], names))
    return f"$(({expression}))" if result is None else str(result)


def _number(expression: str) -> int | None:
    """Return the whole number of an expression of sums and products, as a shell computes it; None for any other."""
    try:
        return _computed(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if len(str(value)) <= _MOST_DIGITS:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left), _computed(right))
    raise ValueError("not arithmetic")
