"""Launch scripts, read but never run: the commands of a shell script with their words, as far as the text alone decides them.

Understood: quotes, comments, line continuations, variables with defaults (`${X:-y}`), arrays, integer arithmetic, `basename` and
`dirname`, `if` with simple tests, here-documents (skipped). Everything else that only running could decide, such as `$(date)`, `$1`
without a default or a variable that was never set, stays in the words as it is written: `${X}`, `$(date)`.
"""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plaudit.convert.arithmetic import evaluate

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[\w+\])?(\+?)=")
OPERATORS = (
    ";;&",
    ";;",
    ";&",
    "&&",
    "||",
    "|&",
    "&>>",
    "&>",
    ">>",
    "<<-",
    "<<<",
    "<<",
    ">&",
    "<&",
    ">|",
    "<>",
    ">",
    "<",
    "|",
    "&",
    ";",
    "(",
    ")",
    "\n",
)
REDIRECTS = {">", ">>", "<", "<<<", ">&", "<&", ">|", "<>", "&>", "&>>"}
DECLARATIONS = ("export", "readonly", "local", "declare", "typeset")
MAX_WORDS = 100_000
MAX_VALUE, MAX_ITEMS, MAX_TRIMMED = 100_000, 10_000, 1000
"""Characters of a word or a variable, items of an array, characters of a value that `${X%…}` cuts: a script that doubles a value
over and over must not fill the memory."""


class NotAScript(ValueError):
    """Text that cannot be a shell script; the message says why."""


@dataclass(frozen=True)
class Word:
    """A word as written, with its first line."""

    text: str
    line: int


@dataclass
class Command:
    words: list[str]
    """Expanded as far as possible."""
    line: int


@dataclass
class Script:
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    """Command substitutions that values depend on, as written."""


def read_script(text: str) -> Script:
    """The commands of a script in their order; branches that a simple test rules out are left out."""
    try:
        return _Reader(text).read()
    except RecursionError:
        raise NotAScript("its quotes and substitutions are nested too deeply") from None


# Words ---------------------------------------------------------------------------------------------------------------


def _tokens(text: str) -> Iterator[Word | str]:
    """Words as they are written, and operators."""
    text, i, line = text.replace("\r\n", "\n"), 0, 1
    heredocs: list[str] = []
    count = 0
    while i < len(text):
        count += 1
        if count > MAX_WORDS:
            raise NotAScript(f"it has more than {MAX_WORDS:,} words")
        if text.startswith("\\\n", i):
            i, line = i + 2, line + 1
        elif text[i] in " \t":
            i += 1
        elif text[i] == "#":
            i = len(text) if (end := text.find("\n", i)) < 0 else end
        elif operator := next((one for one in OPERATORS if text.startswith(one, i)), None):
            i += len(operator)
            if operator in ("<<", "<<-"):
                end = _end_of_word(text, i + len(text[i:]) - len(text[i:].lstrip(" \t")), line)
                heredocs.append(re.sub(r"['\"\\]", "", text[i:end].strip()))
                i = end
                continue
            yield operator
            if operator == "\n":
                line += 1
                for mark in heredocs:
                    lines = text[i:].split("\n")
                    length = next((n for n, one in enumerate(lines) if one.strip() == mark), len(lines) - 1) + 1
                    i, line = min(len(text), i + sum(len(one) + 1 for one in lines[:length])), line + length
                heredocs = []
        else:
            end = _end_of_word(text, i, line)
            yield Word(text[i:end], line)
            line += text.count("\n", i, end)
            i = end


def _end_of_word(text: str, i: int, line: int) -> int:
    """Where the word that starts at `i` ends: quotes and expansions may contain white space."""
    start = i
    while i < len(text):
        if text[i] == "\\":
            i += 2
        elif text[i] in "'\"`" or text.startswith(("$(", "${"), i):
            i = _end_of_quoted(text, i, line)
        elif text[i] == "(" and ASSIGNMENT.fullmatch(text[start:i]):
            i = _matching(text, i, "(", ")", line)
        elif text[i] in " \t\n;&|()<>" and not (text[i] in "<>" and i == start):
            break
        else:
            i += 1
    return min(i, len(text))


def _end_of_quoted(text: str, i: int, line: int) -> int:
    if text[i] == "'":
        return _find(text, "'", i + 1, line) + 1
    if text.startswith("$(", i):
        return _matching(text, i + 1, "(", ")", line)
    if text.startswith("${", i):
        return _matching(text, i + 1, "{", "}", line)
    closing = text[i]
    i += 1
    while i < len(text) and text[i] != closing:
        if text[i] == "\\":
            i += 2
        elif closing == '"' and (text.startswith(("$(", "${"), i) or text[i] == "`"):
            i = _end_of_quoted(text, i, line)
        else:
            i += 1
    if i >= len(text):
        raise NotAScript(f"line {line}: {closing} is never closed")
    return i + 1


def _matching(text: str, i: int, opening: str, closing: str, line: int) -> int:
    depth = 0
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        if text[i] in "'\"" and not (opening == "{" and text[i] == "'"):
            i = _end_of_quoted(text, i, line)
            continue
        depth += (text[i] == opening) - (text[i] == closing)
        i += 1
        if depth == 0:
            return i
    raise NotAScript(f"line {line}: {opening} is never closed")


def _find(text: str, mark: str, i: int, line: int) -> int:
    if (end := text.find(mark, i)) < 0:
        raise NotAScript(f"line {line}: {mark} is never closed")
    return end


# Commands ------------------------------------------------------------------------------------------------------------


@dataclass
class _Branch:
    """An `if` in progress. True and False: the test is decided; None: only running could decide it."""

    taken: bool | None
    done: bool
    """An earlier branch was taken for certain."""


class _Reader:
    def __init__(self, text: str):
        self.script, self._tokens = Script(), list(_tokens(text))
        self._branches: list[_Branch] = []
        self._functions = 0

    def read(self) -> Script:
        words: list[Word] = []
        skip_target = False
        for token in [*self._tokens, "\n"]:
            if isinstance(token, Word):
                if skip_target:
                    skip_target = False
                else:
                    words.append(token)
            elif token in REDIRECTS:
                skip_target = True
                if words and words[-1].text.isdecimal():
                    words.pop()  # 2>&1
            else:
                skip_target = False
                self._command(words)
                words = []
        return self.script

    @property
    def _skipped(self) -> bool:
        return any(branch.taken is False for branch in self._branches)

    @property
    def _uncertain(self) -> bool:
        return any(branch.taken is None for branch in self._branches)

    def _command(self, words: list[Word]) -> None:
        while words and words[0].text in ("then", "do", "{", "}", "!", "time"):
            words = words[1:]
        if not words:
            return
        first = words[0].text
        if first in ("if", "elif"):
            if first == "if":
                self._branches.append(_Branch(None, done=False))
            elif not self._branches:
                return
            branch = self._branches[-1]
            branch.taken = not branch.done  # so that the test itself is not skipped
            outer = any(one.taken is False for one in self._branches[:-1])
            taken = False if branch.done or outer else self._test(words[1:])
            branch.taken, branch.done = taken, branch.done or taken is True
        elif first == "else" and self._branches:
            branch = self._branches[-1]
            if branch.taken is not None:
                branch.taken = not branch.done
            self._command(words[1:])
        elif first in ("fi", "done", "esac") and self._branches:
            self._branches.pop()
        elif first in ("for", "while", "until", "case", "select"):
            self._branches.append(_Branch(None, done=False))
            if first == "for" and len(words) > 1 and NAME.fullmatch(words[1].text):
                self.script.variables.pop(words[1].text, None)
        elif not self._skipped:
            self._run(words)

    def _run(self, words: list[Word]) -> None:
        """Assignments change variables; any other command is recorded."""
        if words[0].text in DECLARATIONS:
            words = [word for word in words[1:] if not word.text.startswith("-")]
            for word in words:
                if ASSIGNMENT.match(word.text):
                    self._assign(word)
            return
        rest = list(words)
        while rest and ASSIGNMENT.match(rest[0].text):
            rest.pop(0)
        if not rest:
            for word in words:
                self._assign(word)
            return
        expanded = [text for word in rest for text in self.expand(word.text)]
        if expanded:
            self.script.commands.append(Command(expanded, rest[0].line))

    def _assign(self, word: Word) -> None:
        match = ASSIGNMENT.match(word.text)
        assert match is not None
        name, index, plus, text = match[1], match[2], match[3], word.text[match.end() :]
        variables = self.script.variables
        if self._uncertain or index:
            variables.pop(name, None)  # its value depends on what only running could decide
            return
        if text.startswith("(") and text.endswith(")"):
            items = [one for token in _tokens(text[1:-1]) if isinstance(token, Word) for one in self.expand(token.text)]
            before = variables.get(name, []) if plus else []
            variables[name] = [*([before] if isinstance(before, str) else before), *items]
            if len(variables[name]) > MAX_ITEMS:
                raise NotAScript(f"line {word.line}: {name} has more than {MAX_ITEMS:,} items")
            return
        value = self._joined(text)
        if plus and isinstance(before := variables.get(name, ""), str):
            value = before + value
        if len(value) > MAX_VALUE:
            raise NotAScript(f"line {word.line}: {name} has more than {MAX_VALUE:,} characters")
        variables[name] = value

    def _test(self, words: Sequence[Word]) -> bool | None:
        """The outcome of `[ a = b ]` and the like; None if only running could decide it."""
        expanded = [self._joined(word.text) for word in words]
        match expanded:
            case ["[" | "[[", left, "=" | "==" | "!=" as operator, right, "]" | "]]"] if not unresolved(left + right):
                same = fnmatch.fnmatchcase(left, right) if expanded[0] == "[[" else left == right
                return same == (operator != "!=")
            case ["[" | "[[", "-z" | "-n" as operator, text, "]" | "]]"] if not unresolved(text):
                return (text == "") == (operator == "-z")
        return None

    # Expansion ---------------------------------------------------------------

    def expand(self, text: str) -> list[str]:
        """The words that a word becomes: several for an array, or for an unquoted variable with spaces."""
        if match := re.fullmatch(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?', text):
            value = self.script.variables.get(match[1])
            return list(value) if isinstance(value, list) else [text.strip('"')]
        if re.fullmatch(r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}", text):
            value = self.script.variables.get(text.strip("${}"))
            if isinstance(value, str) and not unresolved(value):
                return value.split()
        if text in ("$@", '"$@"', "$*", '"$*"', "${@:1}", '"${@:1}"'):
            return ["$@"]
        return [self._joined(text)]

    def _joined(self, text: str, quoted: bool = False) -> str:
        length, parts = 0, []
        for part in self._parts(text, quoted):
            parts.append(part)
            length += len(part)
            if length > MAX_VALUE:
                raise NotAScript(f"a value has more than {MAX_VALUE:,} characters")
        return "".join(parts)

    def _parts(self, text: str, quoted: bool) -> Iterator[str]:
        i = 0
        while i < len(text):
            character = text[i]
            if character == "\\" and i + 1 < len(text):
                following = text[i + 1]
                if following != "\n":
                    yield following if not quoted or following in '$`"\\' else character + following
                i += 2
            elif character == "'" and not quoted:
                end = text.index("'", i + 1)
                yield text[i + 1 : end]
                i = end + 1
            elif character == '"' and not quoted:
                end = _end_of_quoted(text, i, 0)
                yield from self._parts(text[i + 1 : end - 1], quoted=True)
                i = end
            elif text.startswith("$'", i) and not quoted:
                end = text.index("'", i + 2)
                yield text[i + 2 : end]
                i = end + 1
            elif character == "`" or text.startswith(("$(", "${"), i):
                end = _end_of_quoted(text, i, 0)
                yield self._substitution(text[i:end])
                i = end
            elif character == "$" and (match := re.match(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])", text[i:])):
                yield self._variable(match[1], f"${{{match[1]}}}")
                i += match.end()
            else:
                yield character
                i += 1

    def _variable(self, name: str, written: str) -> str:
        value = self.script.variables.get(name)
        if value is None:
            return written
        return " ".join(value) if isinstance(value, list) else value

    def _substitution(self, text: str) -> str:
        if text.startswith("$((") and text.endswith("))"):
            return self._arithmetic(text)
        if text.startswith("${"):
            return self._parameter(text)
        inside = text[2:-1] if text.startswith("$(") else text[1:-1]
        match list(_tokens(inside)):
            case [Word("basename" | "dirname") as program, Word() as path]:
                name = self._joined(path.text)
                if not unresolved(name):
                    head, _, tail = name.rstrip("/").rpartition("/")
                    return tail if program.text == "basename" else head or "."
        self.script.not_run.append(text)
        return text

    def _arithmetic(self, text: str) -> str:
        inside = re.sub(r"\$\(\(|\)\)", lambda match: "(" if match[0][0] == "$" else ")", text)
        inside = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._variable(match[1], f"${{{match[1]}}}"), inside)
        value = evaluate(inside)
        return text if value is None else str(value)

    def _parameter(self, text: str) -> str:
        match = re.fullmatch(r"\$\{([A-Za-z_]\w*|[0-9@*]+)(?:(:?[-=+?]|##?|%%?)(.*))?\}", text, re.S)
        if match is None:
            return text
        name, operator, word = match[1], match[2] or "", match[3] or ""
        value = self.script.variables.get(name)
        value = " ".join(value) if isinstance(value, list) else value
        missing = value is None or (operator.startswith(":") and value == "")
        match operator[-1:]:
            case "-" | "=":
                result = self._joined(word) if missing else value or ""
                if operator[-1] == "=" and missing:
                    self.script.variables[name] = result
                return result
            case "+":
                return "" if missing else self._joined(word)
            case "#" | "%" if value is not None and len(value) <= MAX_TRIMMED and not unresolved(value):
                return _trimmed(value, operator, word)
        return f"${{{name}}}" if value is None else value


def _trimmed(value: str, operator: str, pattern: str) -> str:
    """`${X##*/}` and the like: without the shortest or longest match of a pattern at its start or end."""
    ends = range(len(value) + 1)
    cuts = [value[n:] for n in ends if fnmatch.fnmatchcase(value[:n], pattern)] if operator[0] == "#" else []
    cuts = cuts or [value[:n] for n in reversed(ends) if operator[0] == "%" and fnmatch.fnmatchcase(value[n:], pattern)]
    return (cuts[0] if len(operator) == 1 else cuts[-1]) if cuts else value


def unresolved(value: str) -> bool:
    """Whether a text still contains what only running could decide."""
    return "$" in value or "`" in value
