"""Arithmetic of a shell script."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

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
