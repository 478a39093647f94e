"""The critic of a recipe, before it is loaded: whether it can be one, and reads what the policy writes."""

from collections.abc import Iterator
from pathlib import Path

from plaudit.data.templates import ChatTemplate
from plaudit.doctor.findings import Finding
from plaudit.doctor.memory import check_weights
from plaudit.doctor.rows import check_tokens
from plaudit.models.classifier import is_classifier
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.scalar import value_head_file
from plaudit.recipe import CriticSettings, ModelSettings, RLRecipe


def check_critic(critic: CriticSettings, recipe: RLRecipe, template: ChatTemplate | None, longest_prompt: int) -> Iterator[Finding]:
    alone = f"; the first {critic.pretrain_steps:,} steps are its alone" if critic.pretrain_steps else ""
    if critic.shared:
        moved = (
            f"the value loss counts {critic.loss_coefficient:g} there"
            if critic.loss_coefficient
            else "the value loss does not move them"
        )
        yield "✓", f"a value head on the policy's own layers: {moved}{alone}"
    else:
        yield from _check_model(critic.model(recipe.model), critic, recipe, template, longest_prompt, alone)
    total = recipe.run.max_steps
    if total is not None and critic.pretrain_steps >= total:
        yield "!", f"critic.pretrain_steps is {critic.pretrain_steps:,} and run.max_steps {total:,}: the policy would never learn"


def _check_model(
    model: ModelSettings, critic: CriticSettings, recipe: RLRecipe, template: ChatTemplate | None, longest_prompt: int, alone: str
) -> Iterator[Finding]:
    config = read_config(model.path, trust_remote_code=model.trust_remote_code)
    own = is_classifier(model.path, config) or value_head_file(model.path) is not None
    yield "✓", f"{model.path} with {'its own head' if own else 'a new value head'}{alone}"
    if critic.path is not None:
        yield from check_weights(Path(critic.path))
    if template is not None:
        yield from check_tokens(model.path, template, "critic", trust_remote_code=model.trust_remote_code)
    context = context_tokens(config)
    needed = longest_prompt + recipe.rollout.max_new_tokens
    if context is not None and needed > context:
        yield "✗", f"the longest prompt and max_new_tokens are {needed:,} tokens; {model.path} takes {context:,}"
