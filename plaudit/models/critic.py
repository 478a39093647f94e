"""A critic: what can still be expected, at every token.

    V_t = w · h_{t−1} (+ b)        h_{t−1}: hidden state of the last token before t, so of all that V_t may know

It is a transformers sequence classifier with one label, in memory and on disk: a scalar reward model may be its start, and a saved
critic is loaded by whatever loads one (its score of a text is V behind the text's last token). Differs from transformers: it has a
value at every token, sequences are packed, and the head computes in fp32.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from plaudit.data.templates import ChatTemplate
from plaudit.errors import RecipeError
from plaudit.models.attention import packed_arguments
from plaudit.models.classifier import pad_with
from plaudit.models.folder import architecture, read_config, require_same_tokens
from plaudit.models.lora import attach_lora, merged_weights
from plaudit.models.policy import load_pretrained, resolve_dtype
from plaudit.models.residual import keep_residual_precise
from plaudit.models.scalar import VALUE_HEAD
from plaudit.models.verify import verify_packed_states
from plaudit.recipe import Model
from plaudit.seeding import stable_seed
from plaudit.types import Batch


@dataclass
class Critic:
    """The model, on its device, and the template whose tokens it reads: the policy's."""

    model: PreTrainedModel
    template: ChatTemplate
    adapted: bool = False
    """Its layers carry LoRA adapters."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def save(self, folder: Path) -> None:
        """A folder that loads as a critic, as a scalar reward model, and in transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        # A copy: we pad nothing, but whoever scores several texts with this folder does; what pads the policy's is not ours to say.
        tokenizer, end = deepcopy(self.template.tokenizer), self.template.end_token
        pad_with(tokenizer, self.model.config, [] if end is None else [end])
        self.model.save_pretrained(folder, state_dict=merged_weights(self.model) if self.adapted else None)
        tokenizer.save_pretrained(folder)


def target_values(model: nn.Module, batch: Batch) -> Tensor:
    """V of each token that `batch.loss_mask_T` marks, given what stands before it; in order, in fp32 or finer."""
    hidden_TD = model.get_decoder()(**packed_arguments(batch), use_cache=False).last_hidden_state[0]  # pyright: ignore
    targets_N = batch.loss_mask_T.nonzero()[:, 0]
    head: Any = model.score
    return head(hidden_TD[targets_N - 1].to(head.weight.dtype))[:, 0]


def load_critic(recipe: Model, template: ChatTemplate, device: torch.device, *, seed: int = 0) -> Critic:
    """The recipe's critic, ready to train."""
    require_same_tokens(recipe.path, template.tokenizer, "critic", trust_remote_code=recipe.trust_remote_code)
    new_head = not is_classifier(recipe)
    model = load_pretrained(
        AutoModelForSequenceClassification,
        recipe.path,
        resolve_dtype(recipe.dtype, device),
        trust_remote_code=recipe.trust_remote_code,
        num_labels=1,
        new=("score.",) if new_head else (),
    )
    head = getattr(model, "score", None)
    if type(head) is not nn.Linear:
        raise RecipeError(f"{recipe.path}: {type(model).__name__} has no linear head `score`, so it cannot be a critic")
    head.float()
    if new_head:
        _begin(head, float(getattr(model.config, "initializer_range", 0.02)), seed)
    model.to(device)  # pyright: ignore
    decoder = model.get_decoder()
    keep_residual_precise(decoder)
    verify_packed_states(decoder)
    if recipe.lora is not None:
        attach_lora(model, recipe.lora, seed, section="critic.lora", head="score", train_head=False)
        head.requires_grad_()
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if recipe.lora is not None:
            model.enable_input_require_grads()
    model.train()
    return Critic(model, template, adapted=recipe.lora is not None)


def is_classifier(recipe: Model) -> bool:
    """Whether the folder has a value head already; a RecipeError if it is something that no critic can be made of."""
    path = recipe.path
    config = read_config(path, trust_remote_code=recipe.trust_remote_code)
    kind = architecture(config)
    if kind.endswith("ForSequenceClassification"):
        if config.num_labels != 1:
            raise RecipeError(
                f"{path}: {kind} has {config.num_labels} labels, and a critic has one: this one sorts texts into classes"
            )
        return True
    if Path(path, VALUE_HEAD).exists():
        raise RecipeError(
            f"{path}: its head lies in {VALUE_HEAD}, which a critic does not read; save it as a sequence classifier with one label"
        )
    return False


@torch.no_grad()
def _begin(head: nn.Linear, std: float, seed: int) -> None:
    """A new head, as transformers begins one; the same on every device."""
    chance = torch.Generator().manual_seed(stable_seed("critic", seed))
    head.weight.copy_(torch.randn(head.weight.shape, generator=chance) * std)
    if head.bias is not None:
        head.bias.zero_()
