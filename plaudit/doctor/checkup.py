"""`plaudit doctor`: runs all checks of a recipe and prints one line per finding: ✓ fine, ! warning, ✗ will fail.

A failing check does not prevent the others.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from plaudit.config import LoadedRecipe
from plaudit.data.columns import GROUND_TRUTHS, listed
from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.data.pairs import Preference, read_pairs
from plaudit.data.row_ids import name_sources
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.doctor import memory, preferences, rewards, rows, sharding
from plaudit.doctor.compatibility import PolicyContext, check_compatibility, check_lengths
from plaudit.doctor.critic import check_critic
from plaudit.doctor.engine import check_engine
from plaudit.doctor.findings import MAX_SHOWN_CHARS, Checks, Excerpt, Finding, print_title
from plaudit.doctor.reward_models import ModelRewardCheck, check_ranks
from plaudit.errors import PlauditError
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.memory import Budget
from plaudit.recipe import (
    DPORecipe,
    PreferenceRecipe,
    Recipe,
    RewardModelDataSettings,
    RewardModelRecipe,
    RewardSettings,
    RLRecipe,
    ScoreRecipe,
    SFTRecipe,
    TrainingRecipe,
)
from plaudit.rewards.combine import any_reward_applies
from plaudit.rewards.judges.model_rewards import find_model_rewards
from plaudit.train.auto import resolve_auto, resolve_sharding
from plaudit.train.memory_plan import plan_devices
from plaudit.train.processes import Processes
from plaudit.types import Conversation, Example, Prompt


def run_checkup(
    loaded: LoadedRecipe,
    sources: dict[str, list[Source]],
    *,
    max_rows: int,
    gpu_memory: float | None = None,
) -> Checks:
    """Print the findings. `gpu_memory`: plan for GPUs with this number of bytes, here or elsewhere."""
    console = Console(highlight=False)
    print_title(console, loaded)
    checkup = _Checkup(console, sharding.processes_of(loaded.recipe, gpu_memory))
    if isinstance(loaded.recipe, ScoreRecipe):
        checkup.check_scoring(loaded.recipe)
    else:
        checkup.check_training(loaded.recipe, sources, max_rows)
    return checkup


class _Checkup(Checks):
    def __init__(self, console: Console, processes: Processes):
        super().__init__(console)
        self.processes = processes
        self.template: ChatTemplate | None = None
        self.examples: list[tuple[str, Conversation, Example]] = []
        """Rendered SFT training rows."""
        self.pair: Preference | None = None
        """The first training pair."""
        self.prompts: list[Prompt] = []
        """Training prompts within the length limit."""
        self.longest_prompt = 0
        self.lengths: list[int] = []
        """Of the rendered training rows, in tokens."""
        self.steps = 1
        self.reward_checks: list[ModelRewardCheck] = []
        self.budgets: dict[str, Budget] = {}
        self.shardings: list[sharding.Row] = []

    def check_scoring(self, recipe: ScoreRecipe) -> None:
        for reward in recipe.rewards:
            self._reward(reward, [], None)
        self.check("rewards", lambda: rewards.check_answer_rules(recipe.rewards, []))
        self.check("ranks", lambda: check_ranks(recipe.rewards, 1, training=False))
        self.check("memory", lambda: self._memory(recipe))
        self._show_memory(recipe)
        self._show_reward_model_inputs()

    def check_training(self, recipe: TrainingRecipe, sources: dict[str, list[Source]], max_rows: int) -> None:
        self.check("files", lambda: rows.check_files(sources))
        self.check("template", lambda: self._template(recipe))
        for part in [part for part in sources if sources[part]]:
            self.check("rows", lambda part=part: self._rows(recipe, part, sources[part], max_rows))
        self.check("steps", lambda: self._steps(recipe, sources))
        prompts: list[Prompt] = []
        if isinstance(recipe, RLRecipe):
            prompts = rewards.select_prompts(self.prompts, recipe.rewards)
            longest = self.longest_prompt or recipe.data.max_prompt_tokens
            self.check("context", lambda: rows.check_context(recipe, longest))
            self.check("algorithm", lambda: rewards.check_algorithm(recipe))
            self.check("engine", lambda: check_engine(recipe, self.processes))
            if (critic := recipe.critic) is not None:
                self.check("critic", lambda: check_critic(critic, recipe, self.template, longest))
            if recipe.audit.require is not None:
                self.check("audit", lambda: rewards.check_audit(recipe))
            if recipe.eval.require is not None:
                self.check("evaluation", lambda: rewards.check_evaluation(recipe))
            policy = None if self.template is None else PolicyContext(recipe, self.template, self.prompts)
            for reward in recipe.rewards:
                self._reward(reward, prompts, policy)
            self.check("rewards", lambda: rewards.check_answer_rules(recipe.rewards, self.prompts))
            self.check("ranks", lambda: check_ranks(recipe.rewards, self.processes.size, training=True))
        if (
            isinstance(recipe, DPORecipe | RLRecipe)
            and (reference := recipe.reference.path) is not None
            and (template := self.template) is not None
        ):
            trusted = recipe.model.trust_remote_code
            self.check("reference", lambda: rows.check_tokens(reference, template, "reference", trust_remote_code=trusted))
        if isinstance(recipe, RewardModelRecipe):
            self.check("head", lambda: preferences.check_head(recipe))
        self.check("weights", lambda: memory.check_weights(Path(recipe.model.path)))
        self.check("gpus", lambda: sharding.check_gpus(recipe, self.processes))
        if self.processes.size > 1:
            self.check("sharding", lambda: self._sharding(recipe))
        self.check("memory", lambda: memory.check_training(recipe, self.lengths, self.processes))
        if isinstance(recipe, RLRecipe):
            self.check("memory", lambda: self._memory(recipe))
        self.check("disk", lambda: memory.check_disk(recipe, self.steps, self.processes))
        self._show_memory(recipe)
        sharding.print_shardings(self.console, self.processes, self.shardings)
        self.measured["shardings"] = [row.as_dict() for row in self.shardings]
        self._show_training_input(recipe, prompts)
        self._show_reward_model_inputs()

    # Checks -----------------------------------------------------------------------------------------------------------

    def _template(self, recipe: TrainingRecipe) -> Iterator[Finding]:
        self.template = load_model_template(recipe.model, recipe.data.special_tokens)
        yield from rows.check_template(self.template, recipe)

    def _steps(self, recipe: TrainingRecipe, sources: dict[str, list[Source]]) -> Iterator[Finding]:
        order = rows.row_order(recipe, sources["train"])
        self.steps = order.steps(recipe.run.max_steps)
        yield from rows.check_steps(recipe, order)

    def _rows(self, recipe: TrainingRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        if isinstance(recipe, SFTRecipe):
            yield from self._conversations(recipe, part, sources, max_rows)
        elif isinstance(recipe, PreferenceRecipe):
            yield from self._pairs(recipe, part, sources, max_rows)
        else:
            yield from self._prompts(recipe, part, sources, max_rows)

    def _prompts(self, recipe: RLRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        named = zip(sources, name_sources(sources), strict=True)
        prompts = list(islice((prompt for source, name in named for prompt in read_prompts(source, name)), max_rows or None))
        template, limit = self.template, recipe.data.max_prompt_tokens
        if template is None:
            yield "✓", f"{part}: {len(prompts):,} prompts read, but not rendered for lack of a chat template"
            return
        lengths = np.array([len(rows.prompt_tokens(template, prompt)) for prompt in prompts])
        yield "✓", f"{part}: {len(lengths):,} prompts rendered: {rows.spread(lengths)}"
        self._keep_lengths(recipe, f"{part}: tokens of {len(lengths):,} prompts", lengths)
        yield from rows.check_too_long(part, lengths, "data.max_prompt_tokens", limit, recipe.data.too_long)
        yield from rows.check_control_tokens(part, template, recipe, [(prompt.messages, prompt.tools) for prompt in prompts])
        yield from rows.check_row_limit(part, len(prompts), max_rows)
        self.longest_prompt = max(self.longest_prompt, min(int(lengths.max()), limit))
        missing = sum(prompt.ground_truth is None for prompt in prompts)
        if missing:
            names = listed(["reward_model", *GROUND_TRUTHS])
            yield "!", f"{part}: {missing:,} of {len(prompts):,} prompts have no ground truth for rewards to compare with ({names})"
        unmatched = [prompt for prompt in prompts if not any_reward_applies(recipe.rewards, prompt)]
        if unmatched:
            counts = Counter(prompt.data_source for prompt in unmatched).most_common(5)
            named = ", ".join(f"{source!r}: {count:,}" for source, count in counts)
            yield (
                "✗",
                f"{part}: no reward's `when` matches {len(unmatched):,} of {len(prompts):,} prompts (by data_source: {named}). Add "
                "a reward for them; `when: otherwise` is for all the rest",
            )
        if part == "train":
            short = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
            self.prompts = short or prompts
            self.lengths = [min(int(length), limit) for length in lengths]

    def _conversations(self, recipe: SFTRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        read = islice((item for source in sources for item in read_conversations(source)), max_rows or None)
        template = self.template
        if template is None:
            yield "✓", f"{part}: {sum(1 for _ in read):,} rows read, but not rendered for lack of a chat template"
            return
        rendered = [(where, row, template.example(row, where, recipe.data.train_on)) for where, row in read]
        yield from rows.check_lengths(recipe, part, [example for *_, example in rendered])
        lengths = np.array([len(example) for *_, example in rendered])
        self._keep_lengths(recipe, f"{part}: tokens of {len(rendered):,} rows", lengths)
        yield from rows.check_control_tokens(part, template, recipe, [(row.messages, row.tools) for _, row, _ in rendered])
        yield from rows.check_row_limit(part, len(rendered), max_rows)
        if part == "train":
            self.examples = rendered
            self.lengths = [min(len(example), recipe.data.max_tokens) for *_, example in rendered]
            yield from rows.check_prompts(template, rendered)

    def _pairs(self, recipe: PreferenceRecipe, part: str, sources: Sequence[Source], max_rows: int) -> Iterator[Finding]:
        column = recipe.data.margin_column if isinstance(recipe.data, RewardModelDataSettings) else None
        pairs = list(islice((pair for source in sources for pair in read_pairs(source, column)), max_rows or None))
        yield from preferences.check_margins(recipe, sources)
        if self.template is None:
            yield "✓", f"{part}: {len(pairs):,} pairs read, but not rendered for lack of a chat template"
            return
        different = [(where, pair) for where, pair in pairs if not pair.equal]
        rendered = preferences.render_pairs(recipe, self.template, different)
        yield from preferences.check_pairs(recipe, part, pairs, rendered)
        if rendered:
            sides = np.array([(len(chosen), len(rejected)) for chosen, rejected in rendered])
            self._keep_lengths(recipe, f"{part}: tokens of the longer side of {len(rendered):,} pairs", sides.max(axis=1))
            self.measured["lengths"].append(preferences.count_differences(part, sides[:, 0] - sides[:, 1]))
        both = [([*pair.chosen.messages, *pair.rejected.messages], pair.chosen.tools) for _, pair in pairs]
        yield from rows.check_control_tokens(part, self.template, recipe, both)
        yield from rows.check_row_limit(part, len(pairs), max_rows)
        if part == "train":
            self.lengths = [len(chosen) + len(rejected) for chosen, rejected in rendered]
        if part == "train" and different:
            self.pair = different[0][1]
            if isinstance(recipe, DPORecipe):
                sides = zip(different, rendered, strict=True)
                yield from rows.check_prompts(self.template, [(where, pair.chosen, chosen) for (where, pair), (chosen, _) in sides])

    def _reward(self, reward: RewardSettings, prompts: list[Prompt], policy: PolicyContext | None) -> None:
        """A reward with a model is checked together with its model, any other by scoring a few prompts."""
        models = find_model_rewards(reward)
        for inner in reward.inner if models else [reward]:
            if not find_model_rewards(inner):
                self.check("reward", lambda inner=inner: rewards.check_reward(inner, prompts))
        if policy is not None:
            policy = replace(policy, prompts=[prompt for prompt in policy.prompts if reward.applies_to(prompt)])
        matching = [prompt for prompt in prompts if reward.applies_to(prompt)]
        for name, model_reward in models:
            check = ModelRewardCheck(name, model_reward)
            self.reward_checks.append(check)
            self.check("reward", lambda check=check: check.run(matching))
            self.check("mismatch", lambda check=check: check_compatibility(check, policy))
            self.check("context", lambda check=check: check_lengths(check, policy))

    def _sharding(self, recipe: TrainingRecipe) -> Iterator[Finding]:
        try:
            self.shardings = sharding.plan_shardings(recipe, self.lengths, self.processes)
            yield from sharding.check_sharding(recipe, self.lengths, self.processes, self.shardings)
            self.processes = replace(self.processes, sharding=resolve_sharding(recipe, self.lengths, self.processes))
        except (OSError, ValueError) as error:
            yield "!", f"no plan for several processes: {str(error).splitlines()[0]}"

    def _memory(self, recipe: RLRecipe | ScoreRecipe) -> Iterator[Finding]:
        if isinstance(recipe, RLRecipe):
            # Reported by check_training.
            recipe = resolve_auto(recipe, self.lengths, lambda line: None, self.processes)
        self.budgets = plan_devices(recipe, self.lengths, self.processes)
        yield from memory.check_budgets(recipe, self.budgets, self.processes)

    # What was measured ------------------------------------------------------------------------------------------------

    def _keep_lengths(self, recipe: TrainingRecipe, title: str, lengths: np.ndarray) -> None:
        limits = {"data.max_tokens": recipe.data.max_tokens} if not isinstance(recipe, RLRecipe) else {}
        with suppress(PlauditError, OSError, ValueError):  # reported by another check
            config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
            if (context := context_tokens(config)) is not None:
                limits["the model's context"] = context
        if isinstance(recipe, RLRecipe):
            new = recipe.rollout.max_new_tokens
            limits = {"data.max_prompt_tokens": recipe.data.max_prompt_tokens} | {
                f"{name} − rollout.max_new_tokens": max(0, limit - new) for name, limit in limits.items()
            }
        self.measured["lengths"].append(rows.count_lengths(title, rows.spread(lengths), lengths, limits))

    def _show_memory(self, recipe: Recipe) -> None:
        if isinstance(recipe, RLRecipe | ScoreRecipe):
            memory.print_budgets(self.console, recipe, self.budgets, self.processes)
        else:
            with suppress(PlauditError, OSError, ValueError):  # reported by its check
                resolved = resolve_auto(recipe, self.lengths, lambda line: None, self.processes)
                self.budgets = plan_devices(resolved, self.lengths, self.processes)
        self.measured["memory"] = memory.tabulate(recipe, self.budgets, self.processes)

    def _show_training_input(self, recipe: TrainingRecipe, prompts: Sequence[Prompt]) -> None:
        """The first row, pair or prompt as the policy sees it."""
        if self.template is not None and self.examples and isinstance(recipe, SFTRecipe):
            self.show([rows.first_row(self.template, self.examples[0][1], recipe.data.train_on)])
        if self.template is not None and self.pair is not None and isinstance(recipe, PreferenceRecipe):
            self.show(preferences.first_pair(self.template, recipe, self.pair))
        if self.template is not None and prompts:
            text = self.template.render(prompts[0].messages, prompts[0].tools, generation_prompt=True)
            self.show([Excerpt("The first prompt as the model sees it", Text(text[:MAX_SHOWN_CHARS]))])

    def _show_reward_model_inputs(self) -> None:
        for check in self.reward_checks:
            self.show(check.first_inputs())
