"""Texts to translate → rows that train a translation policy: SFT on responses, then RL.

The policy analyses a text step by step and ends with the translation in a code block (`view: {extract: codeblock}`). RL rows have
no ground truth, because the judge that scores them was trained without one; a test set has the reference translation.

Cross-lingual augmentation (GRRM's towerx): each row once more with another target language, drawn from `targets`, which is neither
the row's source nor its target. These rows have no `trg_text`: there is no reference in their language. (GRRM keeps the old one.)

`extra_info.question` is the task in the words that `ranking-sft` and its siblings use, so a judge trained on their rows with its
built-in template sees prompts as in training.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from plaudit.languages import LANGUAGES, base_language
from plaudit.prepare.columnar_templates import ColumnarTemplate, Shown
from plaudit.prepare.made_rows import BATCH_ROWS, SFT_SCHEMA, RowSummary, messages, rl_rows, rl_schema, write_rows
from plaudit.prepare.scored_groups import EXTRA_INFO, translation_task
from plaudit.prepare.tables import TEXT, Table, compute

TEMPLATE = Path(__file__).parent / "prompts/translation.jinja"
TARGETS = ("en", "de", "fr", "nl", "it", "es", "pt", "ko", "ru", "zh")
"""GRRM's languages for the augmentation."""
RL_SCHEMA = rl_schema({**EXTRA_INFO, "trg_text": pa.string(), "question": pa.string()})
_FENCE = "```"
_BLOCK_AT_THE_END = r"(?s)(?:\A|\n)[ \t]*```[^\n]*\n.*\S.*\n[ \t]*```\z"


def make_translation_sft(
    files: Sequence[Path], out: Path, *, response_column: str = "response", any_response: bool = False,
    template: Path | None = None, skip_bad: bool = False, seed: int = 0, report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write conversations: a text to translate, and a response. Those without a code block at the end are left out."""
    texts = _Texts(files, template, skip_bad, report)
    texts.table.require(response_column)
    responses = texts.table.text(response_column)
    used, summary = texts.table.usable, RowSummary("texts", bad=texts.table.bad)
    if not any_response:
        well_formed = _ends_with_codeblock(responses)
        summary.leave_out("had a response without a single code block at its end", int((used & ~well_formed).sum()))
        used = used & well_formed
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(used))
    summary.read = len(rows)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]
            turns = messages(("user", texts.template.fill(Shown(some))), ("assistant", [responses.take(pa.array(some))]))
            yield pa.Table.from_arrays([turns], schema=SFT_SCHEMA)

    return write_rows(out, batches(), SFT_SCHEMA, summary)


def make_translation_rl(
    files: Sequence[Path], out: Path, *, cross_lingual: bool = False, targets: Sequence[str] = TARGETS, test_set: bool = False,
    data_source: str = "translation", template: Path | None = None, skip_bad: bool = False, seed: int = 0,
    report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write prompts, shuffled; a test set keeps its order, and has the references as ground truth."""
    assert not (test_set and cross_lingual), "a text in another target language has no reference"
    texts = _Texts(files, template, skip_bad, report)
    if test_set:
        texts.table.require("trg_text")
    references = texts.table.text("trg_text") if test_set else texts.table.optional_text("trg_text")
    rows, rng = np.flatnonzero(texts.table.usable), np.random.default_rng(seed)
    summary = RowSummary("texts", read=len(rows), bad=texts.table.bad)
    other = np.full(len(rows), -1)
    if cross_lingual:
        other = np.concatenate([other, texts.draw_targets(rows, targets, rng)])
        rows = np.concatenate([rows, rows])
    order = np.arange(len(rows)) if test_set else rng.permutation(len(rows))

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(rows), BATCH_ROWS):
            some, drawn = (column[order[start : start + BATCH_ROWS]] for column in (rows, other))
            fields = texts.fields(some, drawn, targets)
            prompts = texts.template.fill(Shown(some, task=fields["question"], fields=fields))
            truth = references.take(pa.array(some)).cast(pa.string())
            fields["trg_text"] = compute.if_else(pa.array(drawn < 0), compute.if_else(compute.equal(truth, ""), None, truth), None)
            prompt = messages(("user", prompts))
            yield rl_rows(RL_SCHEMA, data_source, prompt, "translation", truth if test_set else None, fields)

    return write_rows(out, batches(), RL_SCHEMA, summary)


class _Texts:
    """Texts to translate, and the prompt about each."""

    def __init__(self, files: Sequence[Path], template: Path | None, skip_bad: bool, report: Callable[[str], None]):
        self.table = Table(files, skip_bad=skip_bad, report=report)
        self.table.require("src_text", "src_lang", "trg_lang")
        self.text = self.table.text("src_text")
        (self.source, self.source_name), (self.target, self.target_name) = map(self.table.languages, ("src_lang", "trg_lang"))
        added = {"src_text": self.text, "src_language": self.source_name, "trg_language": self.target_name}
        self.template = ColumnarTemplate(template or TEMPLATE, self.table, self._task, {}, added, ())

    def _task(self) -> pa.Array:
        return translation_task(self.source_name, self.target_name, self.text)

    def draw_targets(self, rows: np.ndarray, targets: Sequence[str], rng: np.random.Generator) -> np.ndarray:
        """For each row the number of a target language that is neither its source nor its target."""
        names = pa.array([LANGUAGES[code] for code in targets], TEXT)
        chance = rng.random((len(rows), len(targets)))
        for column in (self.source_name, self.target_name):
            encoded = column.take(pa.array(rows)).dictionary_encode()
            languages = pa.array(map(base_language, encoded.dictionary.to_pylist()), TEXT).take(encoded.indices)
            own = np.asarray(compute.index_in(languages, value_set=names).fill_null(-1))
            known = np.flatnonzero(own >= 0)
            chance[known, own[known]] = np.inf
        return chance.argmin(1)

    def fields(self, rows: np.ndarray, drawn: np.ndarray, targets: Sequence[str]) -> dict[str, pa.Array]:
        """Of `extra_info`. `drawn`: the number of another target language; negative: the row's own."""
        indices, own, other = pa.array(rows), pa.array(drawn < 0), pa.array(np.maximum(drawn, 0))
        source, source_name, text = (column.take(indices) for column in (self.source, self.source_name, self.text))
        codes, names = pa.array(targets, TEXT), pa.array([LANGUAGES[code] for code in targets], TEXT)
        target = compute.if_else(own, self.target.take(indices), codes.take(other))
        target_name = compute.if_else(own, self.target_name.take(indices), names.take(other))
        return {
            "src_text": text, "src_lang": source, "trg_lang": target, "src_language": source_name, "trg_language": target_name,
            "question": translation_task(source_name, target_name, text),
        }  # fmt: skip


def _ends_with_codeblock(responses: pa.Array) -> np.ndarray:
    """As `view: {extract: codeblock}` has it: one block with something in it, and nothing behind it."""
    fences = compute.equal(compute.count_substring(responses, _FENCE), 2)
    return np.asarray(compute.and_(fences, compute.match_substring_regex(responses, _BLOCK_AT_THE_END)))
