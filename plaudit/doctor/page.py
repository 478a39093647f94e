"""The findings and what was measured as one HTML file, for those who would rather see a plan than read it."""

from pathlib import Path

from plaudit.config import LoadedRecipe
from plaudit.doctor.findings import Checks, Excerpt, split_marked
from plaudit.errors import PlauditError
from plaudit.files import write_atomic
from plaudit.redaction import redact_all
from plaudit.report.pages import DOCTOR, draw_file


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
    title = f"{excerpt.title}; {excerpt.marked} are marked" if excerpt.marked else excerpt.title
    return {"title": title, "pieces": list(split_marked(excerpt.text))}
