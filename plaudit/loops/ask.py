"""`plaudit ask`: questions to a model, once or as a chat.

Answers go to stdout; thoughts (`<think>…</think>`), rewards and notes go to stderr, so that a script can use the answers alone.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from plaudit.data.prompts import EncodedPrompt
from plaudit.data.templates import RENDER_ERRORS, load_model_template
from plaudit.errors import DataError
from plaudit.loops.sample import load_engine, sampling_of
from plaudit.recipe import ModelSettings, RewardSettings, SampleSettings
from plaudit.report.progress import console, print_line
from plaudit.report.safe_text import safe_text
from plaudit.rewards.runner import RewardRunner
from plaudit.rewards.view import CLOSE, OPEN
from plaudit.rollout.groups import sample_groups
from plaudit.types import Group, Message, Prompt, Sample, Score, ScoredGroup

HELP = "Ctrl-D or /quit ends the chat, /new starts over, Ctrl-C stops an answer"


@dataclass(frozen=True)
class AskJob:
    model: ModelSettings
    sampling: SampleSettings
    system: str | None = None
    rewards: Sequence[RewardSettings] = ()
    ground_truth: str | None = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def ask(job: AskJob, question: str) -> bool:
    """Print the model's answers to one question; returns whether every answer has a reward, if rewards are given."""
    with ExitStack() as stack:
        return Chat(job, stack).ask(question)


def chat(job: AskJob) -> None:
    """Questions from the terminal, each with the turns before it; n samples show variety, and the first one stays in the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    with ExitStack() as stack:
        conversation = Chat(job, stack)
        print_line(HELP, "dim")
        while True:
            try:
                question = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return
            if question == "/quit":
                return
            if question == "/new":
                conversation.forget()
            elif question.startswith("/"):
                print_line(HELP, "yellow")
            elif question:
                try:
                    conversation.ask(question)
                except KeyboardInterrupt:
                    print_line("stopped; the question is not part of the chat", "yellow")
                except DataError as error:
                    print_line(str(error), "yellow")


class Chat:
    """A model, and the turns so far."""

    def __init__(self, job: AskJob, stack: ExitStack):
        """`stack` closes what the chat starts."""
        self._job = job
        self._template = load_model_template(job.model, job.sampling.special_tokens)
        self._rewards = stack.enter_context(RewardRunner(job.rewards, tolerant=True)) if job.rewards else None
        self._engine = load_engine(job.model, self._template, device=job.sampling.device)
        self._out = Console(highlight=False, soft_wrap=True)
        self._turns: list[Message] = []
        self._asked = 0
        self.forget()

    def forget(self) -> None:
        """Start over."""
        self._turns = [] if self._job.system is None else [{"role": "system", "content": self._job.system}]

    def ask(self, question: str) -> bool:
        """Sample answers and print them; returns whether all of them were scored and no reward failed."""
        group = self._sample([*self._turns, {"role": "user", "content": question}])
        scored = None if self._rewards is None else self._rewards.collect([group], training=False)[0]
        for i, sample in enumerate(group.samples):
            self._print(sample, f"[{i + 1}] " if self._job.sampling.n > 1 else "", scored, i)
        self._turns = [*group.prompt.messages, {"role": "assistant", "content": group.samples[0].text}]
        return scored is None or not has_failures(scored)

    def _sample(self, messages: list[Message]) -> Group:
        settings, job = self._job.sampling, self._job
        try:
            tokens = np.asarray(self._template.prompt_tokens(messages), dtype=np.int32)
        except RENDER_ERRORS as error:
            raise DataError(f"the chat template cannot render these messages: {error}") from None
        if len(tokens) > settings.max_prompt_tokens:
            raise DataError(
                f"the chat has {len(tokens):,} tokens, more than --max-prompt-tokens {settings.max_prompt_tokens:,}; "
                "start over with /new, or raise it"
            )
        prompt = Prompt(f"question {self._asked}", messages, job.data_source, job.ground_truth, job.extra_info)
        self._asked += 1
        prompts, sampling = [EncodedPrompt(prompt, tokens)], sampling_of(settings, job.model)
        [group] = sample_groups(self._engine, prompts, settings.n, sampling, version=self._engine.version)
        return group

    def _print(self, sample: Sample, number: str, scored: ScoredGroup | None, i: int) -> None:
        thoughts, answer = split_thoughts(sample.text)
        if thoughts:
            console.print(Text(safe_text(f"{number}{thoughts}"), style="dim italic"), soft_wrap=True)
        self._out.print(Text.assemble((number, "bold"), safe_text(answer)))
        if sample.status == "truncated":
            print_line(f"{number}stopped after {len(sample):,} tokens (--max-new-tokens)", "yellow")
        if scored is not None:
            print_line(f"{number}{describe_rewards(scored, i)}", "cyan")


def split_thoughts(text: str) -> tuple[str, str]:
    """Thoughts and answer. The opening tag may be part of the prompt; without a closing one, all of it are thoughts."""
    thoughts, closed, answer = text.rpartition(CLOSE)
    if not closed:
        thoughts, answer = (text, "") if text.lstrip().startswith(OPEN) else ("", text)
    return thoughts.replace(OPEN, "").replace(CLOSE, "").strip(), answer.strip()


def describe_rewards(scored: ScoredGroup, i: int) -> str:
    """'reward 1.1: math 1, think_format 0.1'; a failure with its cause."""
    total = scored.scores[i].value
    parts = [f"{name} {_shown(scores[i])}" for name, scores in scored.by_reward.items() if scores[i].applies]
    return f"reward {'none' if total is None else f'{total:.4g}'}: {', '.join(parts) or 'no reward applies'}"


def has_failures(scored: ScoredGroup) -> bool:
    """Whether a reward failed, or an answer has no value."""
    failed = any(score.failure is not None for scores in scored.by_reward.values() for score in scores)
    return failed or any(score.value is None for score in scored.scores)


def _shown(score: Score) -> str:
    if score.failure is not None:
        return f"failed ({score.failure.cause}: {safe_text(score.failure.message)})"
    return f"{score.value:.4g}{' (malformed)' if score.malformed else ''}"
