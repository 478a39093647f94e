"""`plaudit doctor`: everything that can be known about a recipe before it trains, in one page.

Each check is one line: ✓ fine, ! look at it, ✗ will fail. A check that fails does not keep the others from being made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.data.pairs import Preference, read_pairs
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.doctor import memory, preferences, rewards, rows
from plaudit.doctor.clashes import PolicySide, check_lengths, find_clashes
from plaudit.doctor.critic import check_critic
from plaudit.doctor.findings import SHOWN, Finding, print_finding, print_text
from plaudit.doctor.reward_models import Patient
from plaudit.errors import PlauditError
from plaudit.models.memory import Budget
from plaudit.recipe import (
    DPORecipe,
    PreferenceRecipe,
    RewardModelDataSettings,
    RewardModelRecipe,
    RewardSettings,
    RLRecipe,
    ScoreRecipe,
    SFTRecipe,
    TrainingRecipe,
)
from plaudit.rewards.combine import has_reward
from plaudit.rewards.judges.model_rewards import models_of
from plaudit.train.memory_plan import plan_devices, settle_checkpointing
from plaudit.types import Conversation, Example, Prompt


def examine(loaded: LoadedRecipe, sources: dict[str, list[Source]], *, max_rows: int, console: Console | None = None) -> bool:
    """Print the findings; returns whether training can start."""
    console = console or Console(highlight=False)
    console.print(f"[bold]{escape(str(loaded.path))}[/] for plaudit {loaded.recipe.stage}")
    page = _Page(console)
    if isinstance(loaded.recipe, ScoreRecipe):
        page.examine_scoring(loaded.recipe)
    else:
        page.examine_training(loaded.recipe, sources, max_rows)
    return page.healthy


class _Page:
    def __init__(self, console: Console):
        self.console, self.healthy = console, True
        self.template: ChatTemplate | None = None
        self.samples: list[tuple[str, Conversation, Example]] = []
        """Rows of training, rendered."""
        self.pair: Preference | None = None
        """The first of training."""
        self.prompts: list[Prompt] = []
        """Those that are short enough to be trained on."""
        self.longest_prompt = 0
        self.patients: list[Patient] = []
        self.budgets: dict[str, Budget] = {}

    def check(self, name: str, findings: Callable[[], Iterator[Finding]]) -> None:
        try:
            for mark, text in findings():
                self.healthy &= mark != "✗"
                print_finding(self.console, mark, name, text)
        except PlauditError as error:
            self.healthy = False
            print_finding(self.console, "✗", name, str(error))

    def examine_scoring(self, recipe: ScoreRecipe) -> None:
        for reward in recipe.rewards:
            self._reward(reward, [], None)
        self.check("memory", lambda: self._memory(recipe))
        memory.print_budgets(self.console, recipe, self.budgets)
        self._show_prompts()

    def examine_training(self, recipe: TrainingRecipe, sources: dict[str, list[Source]], max_rows: int) -> None:
        self.check("files", lambda: rows.check_files(sources))
        self.check("template", lambda: self._template(recipe))
        for part in [part for part in sources if sources[part]]:
            self.check("rows", lambda part=part: self._rows(recipe, part, sources[part], max_rows))
        self.check("steps", lambda: rows.check_steps(recipe, sources))
        questions: list[Prompt] = []
        if isinstance(recipe, RLRecipe):
            questions = rewards.tried(self.prompts, recipe.rewards)
            longest = self.longest_prompt or recipe.data.max_prompt_tokens
            self.check("context", lambda: rows.check_context(recipe, longest))
            self.check("algorithm", lambda: rewards.check_algorithm(recipe))
            if (critic := recipe.critic) is not None:
                self.check("critic", lambda: check_critic(critic, recipe, self.template, longest))
            if recipe.audit.require is not None:
                self.check("audit", lambda: rewards.check_audit(recipe))
            policy = None if self.template is None else PolicySide(recipe, self.template, self.prompts)
            for reward in recipe.rewards:
                self._reward(reward, questions, policy)
        if (
            isinstance(recipe, DPORecipe)
            and (other := recipe.loss.reference) is not None
            and (template := self.template) is not None
        ):
            trusted = recipe.model.trust_remote_code
            self.check("reference", lambda: rows.check_tokens(other, template, "reference", trust_remote_code=trusted))
        if isinstance(recipe, RewardModelRecipe):
            self.check("head", lambda: preferences.check_head(recipe))
        self.check("weights", lambda: memory.check_weights(Path(recipe.model.path)))
        self.check("memory", lambda: memory.check_training(recipe))
        if isinstance(recipe, RLRecipe):
            self.check("memory", lambda: self._memory(recipe))
            memory.print_budgets(self.console, recipe, self.budgets)
        self._show(recipe, questions)
        self._show_prompts()

    # Checks -----------------------------------------------------------------------------------------------------------

    def _template(self, recipe: TrainingRecipe) -> Iterator[Finding]:
        self.template = load_model_template(recipe.model)
        yield from rows.check_template(self.template, recipe)

    def _rows(self, recipe: TrainingRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        if isinstance(recipe, SFTRecipe):
            yield from self._conversations(recipe, part, sources, max_rows)
        elif isinstance(recipe, PreferenceRecipe):
            yield from self._pairs(recipe, part, sources, max_rows)
        else:
            yield from self._questions(recipe, part, sources, max_rows)

    def _questions(self, recipe: RLRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        prompts = list(islice((prompt for source in sources for prompt in read_prompts(source)), max_rows or None))
        template, limit = self.template, recipe.data.max_prompt_tokens
        if template is None:
            yield "✓", f"{part}: {len(prompts):,} read; without a chat template they cannot be rendered"
            return
        lengths = np.array([len(rows.prompt_tokens(template, prompt)) for prompt in prompts])
        yield "✓", f"{part}: {len(lengths):,} prompts rendered: {rows.spread(lengths)}"
        yield from rows.check_too_long(part, lengths, "data.max_prompt_tokens", limit, recipe.data.too_long)
        yield from rows.check_looked_at(part, len(prompts), max_rows)
        self.longest_prompt = max(self.longest_prompt, min(int(lengths.max()), limit))
        untold = sum(prompt.ground_truth is None for prompt in prompts)
        if untold:
            yield "!", f"{part}: {untold:,} of them have no reward_model.ground_truth"
        untold = [prompt for prompt in prompts if not has_reward(recipe.rewards, prompt)]
        if untold:
            yield "✗", f"{part}: for {len(untold):,} of them no reward's `when` matches (data_source {untold[0].data_source!r})"
        if part == "train":
            short = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
            self.prompts = short or prompts

    def _conversations(self, recipe: SFTRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        read = islice((item for source in sources for item in read_conversations(source)), max_rows or None)
        template = self.template
        if template is None:
            yield "✓", f"{part}: {sum(1 for _ in read):,} read; without a chat template they cannot be rendered"
            return
        rendered = [(where, row, template.example(row, where, recipe.data.train_on)) for where, row in read]
        yield from rows.check_lengths(recipe, part, [example for *_, example in rendered])
        yield from rows.check_looked_at(part, len(rendered), max_rows)
        if part == "train":
            self.samples = rendered
            yield from rows.check_prompts(template, rendered)

    def _pairs(self, recipe: PreferenceRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        column = recipe.data.margin_column if isinstance(recipe.data, RewardModelDataSettings) else None
        pairs = list(islice((pair for source in sources for pair in read_pairs(source, column)), max_rows or None))
        yield from preferences.check_margins(recipe, sources)
        if self.template is None:
            yield "✓", f"{part}: {len(pairs):,} pairs read; without a chat template they cannot be rendered"
            return
        different = [(where, pair) for where, pair in pairs if not pair.equal]
        rendered = preferences.render_pairs(recipe, self.template, different)
        yield from preferences.check_pairs(recipe, part, pairs, rendered)
        yield from rows.check_looked_at(part, len(pairs), max_rows)
        if part == "train" and different:
            self.pair = different[0][1]
            if isinstance(recipe, DPORecipe):
                sides = zip(different, rendered, strict=True)
                yield from rows.check_prompts(self.template, [(where, pair.chosen, chosen) for (where, pair), (chosen, _) in sides])

    def _reward(self, reward: RewardSettings, prompts: list[Prompt], policy: PolicySide | None) -> None:
        """One with a model is examined with it; any other is asked what it pays."""
        models = models_of(reward)
        for one in reward.inner if models else [reward]:
            if not models_of(one):
                self.check("reward", lambda one=one: rewards.check_reward(one, prompts))
        if policy is not None:
            policy = replace(policy, prompts=[prompt for prompt in policy.prompts if reward.applies_to(prompt)])
        asked = [prompt for prompt in prompts if reward.applies_to(prompt)]
        for name, one in models:
            patient = Patient(name, one)
            self.patients.append(patient)
            self.check("reward", lambda patient=patient: patient.examine(asked))
            self.check("clash", lambda patient=patient: find_clashes(patient, policy))
            self.check("context", lambda patient=patient: check_lengths(patient, policy))

    def _memory(self, recipe: RLRecipe | ScoreRecipe) -> Iterator[Finding]:
        if isinstance(recipe, RLRecipe):
            recipe = settle_checkpointing(recipe, tell=lambda line: None)  # said above
        self.budgets = plan_devices(recipe)
        yield from memory.check_budgets(recipe, self.budgets)

    # Shown ------------------------------------------------------------------------------------------------------------

    def _show(self, recipe: TrainingRecipe, questions: Sequence[Prompt]) -> None:
        """What the policy sees."""
        if self.template is not None and self.samples and isinstance(recipe, SFTRecipe):
            rows.show_row(self.console, self.template, self.samples[0][1], recipe.data.train_on)
        if self.template is not None and self.pair is not None and isinstance(recipe, PreferenceRecipe):
            preferences.show_pair(self.console, self.template, recipe, self.pair)
        if self.template is not None and questions:
            text = self.template.render(questions[0].messages, questions[0].tools, generation_prompt=True)
            print_text(self.console, "The first prompt as the model sees it", Text(text[:SHOWN]))

    def _show_prompts(self) -> None:
        """What the reward models see."""
        for patient in self.patients:
            for title, text in patient.shown():
                print_text(self.console, title, text)
