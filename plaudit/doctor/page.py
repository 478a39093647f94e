"""The findings and what was measured as one HTML file, for those who would rather see a plan than read it."""

from pathlib import Path

from plaudit.config import LoadedRecipe
from plaudit.doctor.findings import Checks, Excerpt, split_marked
from plaudit.errors import PlauditError
from plaudit.files import write_atomic
from plaudit.redaction import redact, redact_all
from plaudit.report.pages import DOCTOR, draw_file


def require_folder(file: Path) -> None:
    """Before the work, so that an error costs nothing."""
    if not file.parent.is_dir():
        raise PlauditError(f"--html: there is no folder {file.parent}; create it, or name a file in one that exists")
    if file.is_dir():
        raise PlauditError(f"--html: {file} is a folder; name a file in it, such as {file / 'doctor.html'}")


def write_page(file: Path, loaded: LoadedRecipe, checks: Checks) -> None:
    data = {
        "recipe": str(loaded.path),
        "stage": loaded.recipe.stage,
        "passed": checks.passed,
        "findings": [{"mark": mark, "check": name, "text": text} for mark, name, text in checks.findings],
        "excerpts": [_as_dict(excerpt) for excerpt in checks.excerpts],
        **checks.measured,
    }
    try:
        write_atomic(file, draw_file(f"{loaded.path}: plaudit doctor", DOCTOR, redact_all(data)))
    except OSError as error:
        raise PlauditError(f"--html: {file} cannot be written: {error}") from None


def _as_dict(excerpt: Excerpt) -> dict[str, object]:
    """A text with a secret has no marks: it would have to be found across them."""
    text = excerpt.text.plain
    pieces = list(split_marked(excerpt.text)) if redact(text) == text else [(redact(text), False)]
    title = f"{excerpt.title}; {excerpt.marked} are marked" if excerpt.marked else excerpt.title
    return {"title": title, "pieces": pieces}
