"""Checks of a recipe's critic, without loading it: its head, its tokenizer and its context length."""

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
    pretrain = f"; the first {critic.pretrain_steps:,} steps train only the critic" if critic.pretrain_steps else ""
    if critic.shared:
        loss = (
            f"value loss coefficient {critic.loss_coefficient:g}"
            if critic.loss_coefficient
            else "the value loss trains only the head"
        )
        yield "✓", f"a value head on the policy's own layers: {loss}{pretrain}"
    else:
        yield from _check_model(critic.model(recipe.model), critic, recipe, template, longest_prompt, pretrain)
    total = recipe.run.max_steps
    if total is not None and critic.pretrain_steps >= total:
        yield (
            "!",
            f"critic.pretrain_steps is {critic.pretrain_steps:,} and run.max_steps {total:,}: the policy never trains",
        )


def _check_model(
    model: ModelSettings,
    critic: CriticSettings,
    recipe: RLRecipe,
    template: ChatTemplate | None,
    longest_prompt: int,
    pretrain: str,
) -> Iterator[Finding]:
    config = read_config(model.path, trust_remote_code=model.trust_remote_code)
    has_head = is_classifier(model.path, config) or value_head_file(model.path) is not None
    yield "✓", f"{model.path} with {'its own head' if has_head else 'a new value head'}{pretrain}"
    if critic.path is not None:
        yield from check_weights(Path(critic.path))
    if template is not None:
        yield from check_tokens(model.path, template, "critic", trust_remote_code=model.trust_remote_code)
    context = context_tokens(config)
    needed = longest_prompt + recipe.rollout.max_new_tokens
    if context is not None and needed > context:
        yield "✗", f"the longest prompt plus max_new_tokens is {needed:,} tokens; the context of {model.path} is {context:,}"
