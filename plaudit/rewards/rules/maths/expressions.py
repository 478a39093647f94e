r"""LaTeX formulas parsed into trees without sympy: in linear time, within bounds, and never evaluated as code.

A tree is a tuple: ('num', Fraction), ('sym', name), ('const', 'pi' | 'e' | 'i' | 'oo'), or an operation and its operands:
('add' | 'mul' | 'div' | 'pow', a, b), ('neg', a), ('call', function, argument), ('apply', f, argument),
('root', n, a), ('log', base, a), ('binom', n, k).

Differs from latex2sympy: `2\frac{1}{2}` is a mixed number, an unknown command or word makes the formula unreadable instead of a
product of its letters, and parsing a formula of a million powers takes time linear in its length.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]

DEEPEST = 40
MOST_DIGITS = 400
MOST_BITS = 20_000
"""Size limit for exact numbers; longer ones have no exact value here."""


class Unreadable(Exception):
    """Not a formula, or not one that this parser supports."""


_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\w^.])|\d+(?:\.\d*)?|\.\d+|\\[a-zA-Z]+|\\.|[a-zA-Z]+|\*\*|\S)", re.A)
_LETTERS = re.compile(r"[abcdknmpqrtuvwxyz]+|[A-Z][bcdfghjklmnpqrstvwxz]{2}")
GREEK = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
        "omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar",
    )
)
FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log lg exp asin acos atan sgn det gcd lcm max min",
    )
)
_EVALUATED = FUNCTIONS - frozenset(["det", "gcd", "lcm", "max", "min", "sgn"])
_DIGITS = frozenset("0123456789.")
_TIMES = frozenset(["*", "\\cdot", "\\times", "\\ast"])
_FUNCTION_LETTERS = frozenset("fghFGEPT")
"""Letters that denote a function before any bracket: E(X + Y), P(A + B), T(n - 1)."""
_POSSIBLE_FUNCTIONS = frozenset("ABCDHIJKLMNOQRSUVWXYZuvpq") | GREEK
"""These, and any letter with an index, denote a function before a single term, and are a factor of a sum: S(n), but A(B + C)."""
_OPENING = {"(": ")", "[": "]", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ACCENTS = {"\\bar": "bar", "\\overline": "bar", "\\hat": "hat", "\\widehat": "hat", "\\tilde": "tilde", "\\widetilde": "tilde",
            "\\vec": "vec", "\\overrightarrow": "vec"}  # fmt: skip
_NAMED = frozenset(["\\text", *_ACCENTS])
CONSTANTS = {"pi": "\\pi", "sqrt": "\\sqrt", "infty": "\\infty", "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty"}


def read_expression(text: str) -> Tree:
    """Parse a formula into its tree; raises Unreadable."""
    reader = _Reader([*_tokens(text), ""])
    try:
        tree = reader.sum()
    except RecursionError:
        raise Unreadable("too deep") from None
    if reader.token:
        raise Unreadable(f"unexpected {reader.token}")
    return tree


def _tokens(text: str) -> Iterator[str]:
    """Numbers, commands, single letters and signs. Words become commands if they name a function, else letters if short."""
    if text.count("**") > 1 and re.search(r"\*\*[^+,]*\*\*", text):
        raise Unreadable("a power of a power")
    for found in _TOKEN.finditer(text):
        token = "^" if found[1] == "**" else found[1]
        if not (token[0].isalpha() and len(token) > 1):
            yield token
        elif token.lower() in FUNCTIONS:
            yield "\\" + token.lower()
        elif token in CONSTANTS:
            yield CONSTANTS[token]
        else:
            # 'xy', 'ABC' and 'Prt' are products or names; 'dollars' is not.
            if len(token) > 4 or (len(token) > 2 and not token.isupper() and not _LETTERS.fullmatch(token)):
                raise Unreadable(f"word {token}")
            yield from token


class _Reader:
    """Recursive-descent parser. An empty token ends its tokens."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.bars = 0

    @property
    def token(self) -> str:
        return self.tokens[self.at]

    def take(self) -> str:
        token = self.token
        if not token:
            raise Unreadable("it ends too early")
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"no {token}")

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("too deep")
        tree = self.product()
        while self.token in ("+", "-"):
            sign, term = self.take(), self.product()
            tree = ("add", tree, term if sign == "+" else ("neg", term))
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        if self.token in ("+", "-"):
            sign, term = self.take(), self.product()
            return term if sign == "+" else ("neg", term)
        tree = self.power()
        while True:
            if self.token in _TIMES:
                if _is_vector(tree):
                    raise Unreadable("a product of vectors")  # neither of the two is a product of numbers
                self.take()
                tree = ("mul", tree, self.signed())
            elif self.token in ("/", "\\div"):
                self.take()
                tree = ("div", tree, self.signed())
            elif self.starts_factor():
                if self.token[0] in _DIGITS and self.tokens[self.at - 1] not in ("}", ")"):
                    raise Unreadable("a number behind a factor")  # '2 3', 'x 2'
                tree = ("mul", tree, self.power())
            else:
                return tree

    def signed(self) -> Tree:
        if self.token == "-":
            self.take()
            return ("neg", self.power())
        return self.power()

    def starts_factor(self) -> bool:
        token = self.token
        if not token or token in _TIMES:
            return False
        if token == "|":
            return not self.bars  # inside bars, a bar closes them
        if token[0] == "\\":
            return token in _OPENING or token in _NAMED or token[1:] in GREEK | FUNCTIONS or token in _ATOMS
        return (token.isascii() and token.isalnum()) or token[0] in _DIGITS or token in "([{"

    def power(self) -> Tree:
        start = self.at
        tree = self.atom()
        if self.tokens[start][0] in _DIGITS and "." not in self.tokens[start] and self.at == start + 1:
            tree = self.mixed(tree)
        while self.token in ("^", "!", "\\%", "%", "\\degree", "'"):
            mark = self.take()
            if mark == "^":
                tree = ("pow", tree, self.argument())
            elif mark == "!":
                tree = ("call", "factorial", tree)
            elif mark == "\\degree":
                tree = ("mul", tree, ("div", ("const", "pi"), ("num", Fraction(180))))
            elif mark == "'":
                raise Unreadable("a derivative")
            else:
                tree = ("div", tree, ("num", Fraction(100)))
        return tree

    def mixed(self, whole: Tree) -> Tree:
        """2\\frac{1}{2} and 2 1/2 are two and a half: a whole number before a proper fraction of whole numbers."""
        ahead = self.tokens[self.at : self.at + 7]
        if len(ahead) == 7 and ahead[0] == "\\frac" and (ahead[1], ahead[3], ahead[4], ahead[6]) == ("{", "}", "{", "}"):
            above, below, used = ahead[2], ahead[5], 7
        elif len(ahead) >= 2 and ahead[0] == "\\frac" and re.fullmatch(r"[1-9]{2}", ahead[1]):
            above, below, used = ahead[1][0], ahead[1][1], 2
        elif len(ahead) >= 3 and ahead[1] == "/" and ahead[0].isdecimal():
            above, below, used = ahead[0], ahead[2], 3
        else:
            return whole
        if not (above.isdecimal() and below.isdecimal() and len(below) < 20 and 0 < int(above[:20]) < int(below)):
            return whole
        self.at += used
        return ("num", whole[1] + Fraction(int(above), int(below)))

    def argument(self) -> Tree:
        """The operand of ^ or a command: a group, or one token ('x^23' is x^2 3 in LaTeX; here 23 is read as one number)."""
        if self.token == "{":
            return self.group("}")
        if self.token == "-":
            self.take()
            return ("neg", self.argument())
        return self.atom()

    def group(self, closing: str) -> Tree:
        self.take()
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.expect(closing)
        return tree

    def atom(self) -> Tree:
        token = self.token
        if token in _OPENING or token == "{":
            closing = _OPENING.get(token, "}")
            if token == "\\{":
                raise Unreadable("a set")
            tree = self.group(closing)
            return ("call", token[2:], tree) if token in ("\\lfloor", "\\lceil") else tree
        if token == "|":
            self.take()
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.expect("|")
            return ("call", "abs", tree)
        self.take()
        if token[0] in _DIGITS:
            return self.number(token)
        if token.isascii() and token.isalpha():
            return self.symbol(token)
        if token[1:] in GREEK:
            return self.symbol(token[1:])
        if token[1:] in _EVALUATED:
            return self.function(token[1:])
        if token in _NAMED:
            return self.symbol(_accented(_ACCENTS.get(token, ""), self.name()))
        if token in _ATOMS:
            return _ATOMS[token](self)
        raise Unreadable(f"unknown {token}" if token else "it ends too early")

    def number(self, token: str) -> Tree:
        if len(token) > MOST_DIGITS or token == ".":
            raise Unreadable("too many digits, or none")
        if "e" in token.lower():
            digits, exponent = token.lower().split("e")
            if abs(int(exponent)) > MOST_DIGITS:
                raise Unreadable("too many digits")
            return ("num", Fraction(digits) * Fraction(10) ** int(exponent))
        value = Fraction(token.rstrip(".")) if "." in token else Fraction(int(token))
        if "." in token and self.token in ("\\overline", "\\bar") and self.tokens[self.at + 1 : self.at + 2] == ["{"]:
            digits = self.tokens[self.at + 2] if self.at + 2 < len(self.tokens) else ""
            if not digits.isdecimal():
                raise Unreadable("a bar over no digits")
            self.at += 3
            self.expect("}")
            if self.token[:1] in _DIGITS:
                raise Unreadable("digits behind a period")
            places = len(token.split(".")[1])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return ("num", value)

    def name(self) -> str:
        if self.token != "{":
            return self.take()
        letters, depth = [], 0
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if depth == 0:
                break
            letters.append(token)
        name = "".join(letter for letter in letters if letter not in ("{", "}", "\\text"))
        if len(name) > 12 or not name.replace("_", "").isalnum():
            raise Unreadable("a long name")
        return name

    def symbol(self, name: str) -> Tree:
        if name in ("e", "i") and self.token != "_":
            return ("const", name)
        if self.token == "_":
            self.take()
            name += "_" + self.name()
        if self.token in ("(", "["):
            possible = name in _POSSIBLE_FUNCTIONS or "_" in name
            if name in _FUNCTION_LETTERS or (possible and not self.is_sum_ahead()):
                return ("apply", name, self.atom())
        return ("sym", name)

    def is_sum_ahead(self) -> bool:
        """Whether the brackets that open here enclose a sum: looked up, since reading it twice takes time exponential in depth."""
        depth = 0
        for at in range(self.at, len(self.tokens) - 1):
            token = self.tokens[at]
            depth += (token[-1] in "([{") - (token[-1] in ")]}")
            if depth == 0:
                break
            if depth == 1 and token in ("+", "-") and at > self.at + 1:
                return True
        return False

    def function(self, name: str) -> Tree:
        power = base = None
        while self.token in ("^", "_"):
            if self.take() == "^":
                power = self.argument()
            elif name == "log":
                base = self.argument()
            else:
                raise Unreadable("an index")
        tree = self.function_argument()
        if name in ("log", "lg"):
            # A log without a base means the same in the reference and the answer, whichever base that is.
            tree = ("log", base, tree) if base is not None else ("call", "log10" if name == "lg" else "log", tree)
        elif power == ("neg", ("num", Fraction(1))):
            return ("call", "arc" + name, tree)
        else:
            tree = ("call", {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name), tree)
        return tree if power is None else ("pow", tree, power)

    def function_argument(self) -> Tree:
        """sin(x) y is sin(x)·y, but sin 2x is sin(2x): without brackets, all factors up to a function or an operator."""
        if self.token in ("(", "[", "{", "|"):
            return self.power() if self.token == "|" else self.argument() if self.token == "{" else self.atom()
        tree = self.signed()
        while True:
            if self.token == "/" and tree[0] != "div":
                self.take()
                tree = ("div", tree, self.power())
            elif self.starts_factor() and self.token[1:] not in FUNCTIONS and self.token[0] not in _DIGITS and self.token != "(":
                tree = ("mul", tree, self.power())
            else:
                return tree

    def fraction(self) -> Tree:
        return ("div", self.fraction_part(), self.fraction_part())

    def fraction_part(self) -> Tree:
        """\\frac12 is a half: without braces, one digit each."""
        token = self.token
        if token.isdecimal() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return ("num", Fraction(int(token[0])))
        return self.argument()

    def root(self) -> Tree:
        index: Tree = ("num", Fraction(2))
        if self.token == "[":
            index = self.group("]")
        return ("root", index, self.argument())

    def binomial(self) -> Tree:
        return ("binom", self.argument(), self.argument())


def _accented(accent: str, name: str) -> str:
    """z̄ is another symbol than z. A bar over several letters is a segment, AB, or the digits of a number."""
    if not accent or (accent == "bar" and not name.startswith("\\") and len(name.split("_")[0]) > 1):
        return name
    return f"{accent} {name}"


def _is_vector(tree: Tree) -> bool:
    """Whether it is built from vectors; |a| is a number."""
    if tree[0] == "sym":
        return tree[1].startswith("vec ")
    return tree[0] in ("neg", "add", "mul", "div") and any(_is_vector(part) for part in tree[1:])


_ATOMS: dict[str, Callable[[_Reader], Tree]] = {
    "\\frac": _Reader.fraction,
    "\\sqrt": _Reader.root,
    "\\binom": _Reader.binomial,
    "\\pi": lambda reader: reader.symbol("pi") if reader.token == "_" else ("const", "pi"),
    "\\infty": lambda reader: ("const", "oo"),
}


# Operations on trees --------------------------------------------------------------------------------------------------


def symbols(tree: Tree) -> frozenset[str]:
    found, left = set(), [tree]
    while left:
        part = left.pop()
        if part[0] == "sym":
            found.add(part[1])
        else:
            left += [one for one in part[1:] if isinstance(one, tuple)]
    return frozenset(found)


def rename(tree: Tree, old: str, new: str) -> Tree:
    if tree == ("sym", old):
        return ("sym", new)
    return tuple(rename(part, old, new) if isinstance(part, tuple) else part for part in tree)


def exact(tree: Tree) -> Fraction | None:
    """The exact value of a formula of rational numbers; None if it has none, or one with too many digits."""
    match tree:
        case ("num", value):
            return value
        case ("neg", a):
            x = exact(a)
            return None if x is None else -x
        case ("add" | "mul" | "div" | "pow" as operation, a, b):
            x, y = exact(a), exact(b)
            return None if x is None or y is None else _apply(operation, x, y)
        case ("call", "abs", a):
            x = exact(a)
            return None if x is None else abs(x)
    return None


def _apply(operation: str, x: Fraction, y: Fraction) -> Fraction | None:
    bits = max(x.numerator.bit_length(), x.denominator.bit_length())
    if bits + max(y.numerator.bit_length(), y.denominator.bit_length()) > MOST_BITS:
        return None
    if operation == "add":
        return x + y
    if operation == "mul":
        return x * y
    if operation == "div":
        return x / y if y else None
    if y.denominator != 1 or bits * abs(y) > MOST_BITS or (x == 0 and y <= 0):
        return None
    return x**y.numerator
