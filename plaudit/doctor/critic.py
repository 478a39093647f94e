"""The critic of a recipe, before it is loaded: whether it can be one, and reads what the policy writes."""

from collections.abc import Iterator
from pathlib import Path

from plaudit.data.templates import ChatTemplate
from plaudit.doctor.findings import Finding
from plaudit.doctor.memory import check_weights
from plaudit.doctor.rows import check_tokens
from plaudit.models.critic import is_classifier
from plaudit.models.folder import context_tokens, read_config
from plaudit.recipe import Critic, RLRecipe


def check_critic(critic: Critic, recipe: RLRecipe, template: ChatTemplate | None, longest_prompt: int) -> Iterator[Finding]:
    model = critic.model(recipe.model)
    head = "its own head" if is_classifier(model) else "a new value head"
    alone = f"; the first {critic.warmup_steps:,} steps are its alone" if critic.warmup_steps else ""
    yield "✓", f"{model.path} with {head}{alone}"
    if critic.path is not None:
        yield from check_weights(Path(critic.path))
    if template is not None:
        yield from check_tokens(model.path, template, "critic", trust_remote_code=model.trust_remote_code)
    context = context_tokens(read_config(model.path, trust_remote_code=model.trust_remote_code))
    needed = longest_prompt + recipe.rollout.max_new_tokens
    if context is not None and needed > context:
        yield "✗", f"the longest prompt and max_new_tokens are {needed:,} tokens; {model.path} takes {context:,}"
    total = recipe.run.max_steps
    if total is not None and critic.warmup_steps >= total:
        yield "!", f"critic.warmup_steps is {critic.warmup_steps:,} and run.max_steps {total:,}: the policy would never learn"
