"""Prompts → thoughts and answers by a strong model, to train a smaller one on.

With thoughts, the last user message ends with a request for this form, and an answer is accepted only if it has it:

    <think> thought </think> <response> response </response>

    it begins with <think>, which it has once, and has <response>
    the thought ends at </think>, else at <response>; the response at </response>, else at the end
    neither is empty or contains one of the four tags, and the answer was not cut at max_new_tokens

Another answer is requested if one is not accepted, then the prompt is left out, as is one that the server rejects though it answers
others. Every answer is recorded in `OUT.answers.jsonl` as soon as it arrives, so that nothing is called for twice after a kill; OUT
is made of these, in the order of the prompts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plaudit.data.conversations import Source, read_prompts
from plaudit.data.row_ids import name_sources
from plaudit.errors import DataError, PlauditError, RunError
from plaudit.files import text_digest
from plaudit.prepare.english import is_english
from plaudit.prepare.row_files import write_row_file
from plaudit.recipe.thoughts import ThoughtsSettings
from plaudit.report.activity import Activity
from plaudit.report.progress import StepProgress, print_line
from plaudit.response_files import CLOSE, CLOSE_RESPONSE, OPEN, OPEN_RESPONSE, TAGS
from plaudit.resumable import ResumableJsonl, open_resumable
from plaudit.reward_models.backend import CONTEXT, Backend, GenerationRequest, SamplingParams
from plaudit.reward_models.many_calls import CallReport, call_each
from plaudit.reward_models.model_registry import describe_usage
from plaudit.types import Failure, Message

REQUEST = (
    "FORMAT: Before you reply, plan the reply in writing. Put the plan between <think> and </think>, and after it the reply itself "
    "between <response> and </response>. Start with <think>, use each of these tags once, and write nothing outside of them. The "
    "plan is about the conversation only: it never mentions this note."
)
COST_FREE = {"url", "credential", "prompt_price", "answer_price"}
"""Settings of a model that its answers do not depend on."""


@dataclass(frozen=True)
class Question:
    """A prompt to be answered."""

    id: str
    messages: list[Message]
    source: str


@dataclass(frozen=True)
class WrittenAnswer:
    """What the model wrote in one try."""

    id: str
    text: str
    truncated: bool = False
    too_long: bool = False
    """The prompt does not fit into the model's context: there is no text."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    rejected: str = ""
    """Why the server rejects this prompt: there is no text."""


@dataclass
class ThoughtsSummary:
    prompts: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Prompts without a row, by reason."""
    unanswered: int = 0
    """Prompts whose calls failed: they may succeed later."""
    calls: CallReport = field(default_factory=CallReport)

    def __str__(self) -> str:
        parts = [f"{self.written:,} rows of {self.prompts:,} prompts"]
        parts += [f"{count:,} left out: {reason}" for reason, count in self.left_out.most_common()]
        if self.unanswered:
            parts.append(f"{self.unanswered:,} without an answer ({self.calls.causes})")
        if self.calls.totals:
            parts.append(describe_usage(self.calls.totals))
        return "; ".join(parts)


@dataclass(frozen=True)
class ThoughtsJob:
    settings: ThoughtsSettings
    sources: Sequence[Source]
    out: Path
    thoughts: bool = True
    """False: answers alone, without a request for a form."""
    tries: int = 2
    english: bool = False
    max_prompts: int | None = None
    allow_failures: bool = False
    """Write the rows there are, although no further calls can be made."""


def write_thoughts(job: ThoughtsJob) -> ThoughtsSummary:
    """Call the model for every prompt that has no accepted answer yet, and write the rows."""
    journal = job.out.with_name(f"{job.out.name}.answers.jsonl")
    if job.out.exists() and not journal.exists():
        raise PlauditError(f"--out: {job.out} exists and {journal.name}, from which it could be resumed, does not; choose another")
    summary = ThoughtsSummary()
    questions = _read_questions(job, summary)
    with open_resumable(journal, _inputs(job), "prepare thoughts") as file:
        answers: dict[str, list[WrittenAnswer]] = {}
        for row in file.rows():
            answers.setdefault(row["id"], []).append(WrittenAnswer(**row))
        left = [question for question in questions if not _settled(answers.get(question.id, ()), job)]
        if len(left) < len(questions):
            rest = "; resuming with the rest" if left else ""
            print_line(f"{job.out}: has answers to {len(questions) - len(left):,} of {len(questions):,} prompts{rest}")
        if left:
            summary.calls = _call(job, left, len(questions), answers, file)
    if summary.calls.stopped is not None and not job.allow_failures:
        raise RunError(
            f"no further calls are made: {summary.calls.causes}. Fix the cause, then run the same command to resume; the answers "
            f"so far are in {journal}. With --allow-failures, rows are made of these."
        )
    rows = []
    for question in questions:
        row = _row(question, answers.get(question.id, ()), job, summary)
        rows += [row] if row is not None else []
    if not rows:
        raise DataError(f"{', '.join(map(str, job.sources))}: no rows could be made ({summary})")
    summary.written = len(rows)
    write_row_file(job.out, rows)
    return summary


def _read_questions(job: ThoughtsJob, summary: ThoughtsSummary) -> list[Question]:
    questions: dict[str, Question] = {}
    for source, name in zip(job.sources, name_sources(job.sources), strict=True):
        for prompt in read_prompts(source, name):
            extra = prompt.extra_info
            id = str(prompt.id if extra.get("id") is None else extra["id"])
            summary.prompts += 1
            if id in questions:
                summary.left_out["the id of an earlier row"] += 1
            elif prompt.messages[-1]["role"] != "user":
                summary.left_out["the last message is not a user's"] += 1
            elif job.english and not is_english(prompt.messages[-1]["content"]):
                summary.left_out["not in English"] += 1
            else:
                questions[id] = Question(id, prompt.messages, str(extra.get("source") or prompt.data_source or source.name()))
            if len(questions) == job.max_prompts:
                return list(questions.values())
    return list(questions.values())


def _inputs(job: ThoughtsJob) -> dict[str, Any]:
    """Everything the answers depend on. More tries, and more prompts of the same files, may follow."""
    return {
        "model": job.settings.model.model_dump(mode="json", exclude=COST_FREE),
        "sampling": job.settings.sampling.model_dump(),
        "prompts": {str(source): source.fingerprint() for source in job.sources},
        "request": text_digest(REQUEST) if job.thoughts else None,
    }


# Calls ---------------------------------------------------------------------------------------------------------------


def _call(
    job: ThoughtsJob, left: Sequence[Question], total: int, answers: dict[str, list[WrittenAnswer]], file: ResumableJsonl
) -> CallReport:
    sampling, limits = job.settings.sampling, job.settings.limits
    params = SamplingParams(
        sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.seed,
        timeout_s=limits.call_timeout_s(sampling.max_new_tokens),
    )  # fmt: skip
    activity, done = Activity(), total - len(left)
    with StepProgress("thoughts", total, done, activity=activity) as progress:

        def show_done() -> None:
            nonlocal done
            done += 1
            progress.update(done, {})

        async def call(backend: Backend, question: Question) -> Failure | None:
            known = answers.setdefault(question.id, [])
            while not _settled(known, job):
                request = GenerationRequest(_request(question, job), key=f"{question.id}#{len(known)}")
                [answer] = await backend.generate([request], params)
                if answer.too_long:
                    return Failure(CONTEXT, f"prompt {question.id} is longer than the model's context")
                if answer.failure is not None:
                    return answer.failure
                written = WrittenAnswer(
                    question.id, answer.text or "", answer.truncated, False, answer.prompt_tokens, answer.new_tokens
                )
                known.append(written)
                file.write(asdict(written))
            show_done()
            return None

        def settle(question: Question, failure: Failure) -> None:
            too_long = failure.cause == CONTEXT
            written = WrittenAnswer(question.id, "", too_long=too_long, rejected="" if too_long else failure.message)
            answers[question.id].append(written)
            file.write(asdict(written))
            show_done()

        answered = any(answer.text for known in answers.values() for answer in known)
        report = call_each(job.settings.model, limits, left, call, settle, answered=answered)
    file.sync()
    return report


def _request(question: Question, job: ThoughtsJob) -> list[Message]:
    if not job.thoughts:
        return question.messages
    *before, last = question.messages
    return [*before, {**last, "content": f"{last['content']}\n\n{REQUEST}"}]


def _settled(answers: Sequence[WrittenAnswer], job: ThoughtsJob) -> bool:
    """Whether no further answer is needed: one is accepted, the server rejects the prompt, or the tries are used up."""
    return len(answers) >= job.tries or any(
        answer.too_long or answer.rejected or _read(answer, job) is not None for answer in answers
    )


# Answers -------------------------------------------------------------------------------------------------------------


def _read(answer: WrittenAnswer, job: ThoughtsJob) -> tuple[str, str] | None:
    """Thought and response of an answer that is accepted."""
    if answer.truncated or answer.too_long or answer.rejected:
        return None
    return split_thought(answer.text) if job.thoughts else _plain_response(answer.text)


def split_thought(text: str) -> tuple[str, str] | None:
    """Thought and response, if the text has the form that was requested."""
    text = text.strip()
    if not text.startswith(OPEN) or text.count(OPEN) > 1 or OPEN_RESPONSE not in text:
        return None
    before, _, after = text.removeprefix(OPEN).partition(OPEN_RESPONSE)
    thought, response = before.partition(CLOSE)[0].strip(), after.partition(CLOSE_RESPONSE)[0].strip()
    return (thought, response) if thought and response and not has_tags(thought, response) else None


def _plain_response(text: str) -> tuple[str, str] | None:
    return ("", text.strip()) if text.strip() and not has_tags(text) else None


def has_tags(*texts: str) -> bool:
    return any(tag in text for text in texts for tag in TAGS)


def _row(question: Question, answers: Sequence[WrittenAnswer], job: ThoughtsJob, summary: ThoughtsSummary) -> dict[str, Any] | None:
    read = next((read for answer in answers if (read := _read(answer, job)) is not None), None)
    if read is None:
        if not _settled(answers, job):
            summary.unanswered += 1
        elif any(answer.too_long for answer in answers):
            summary.left_out["longer than the model's context"] += 1
        elif any(answer.rejected for answer in answers):
            summary.left_out["rejected by the server"] += 1
        elif all(answer.truncated for answer in answers):
            summary.left_out[f"cut at sampling.max_new_tokens in {job.tries} tries"] += 1
        else:
            form = "the form was not kept" if job.thoughts else "nothing, or tags of thoughts,"
            summary.left_out[f"{form} in {job.tries} tries"] += 1
        return None
    thought, response = read
    kept = {"thought": thought} if job.thoughts else {}
    return {"id": question.id, "messages": question.messages, **kept, "response": response, "source": question.source}
