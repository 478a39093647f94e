"""Integer arithmetic of launch scripts, `$((3 * (P + R)))`, computed without running anything."""

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
LIMIT = 2**63
MAX_CHARACTERS = 1000


def evaluate(text: str) -> int | None:
    """The value, or None if it is anything but numbers, + − * / %, and parentheses."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(int() as number) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp(ast.USub(), operand):
            result = -_value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            result = OPERATIONS[type(operation)](_value(left), _value(right))
        case _:
            raise ValueError
    if abs(result) >= LIMIT:
        raise ValueError
    return result
