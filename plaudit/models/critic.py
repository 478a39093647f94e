"""A critic: what can still be expected, at every token.

    V_t = w · h_{t−1}        h_{t−1}: hidden state of the last token before t, so of all that V_t may know

Either a model of its own, which is a sequence classifier with one label, in memory and on disk: a scalar reward model may be its
start, and a saved critic is loaded by whatever loads one (its score of a text is V behind the text's last token). Or a head on the
policy's own layers: one pass through them gives log-probs and values. A new head begins at 0, so that the first values are 0 and
not noise, and the policy's layers are not moved by a head that knows nothing.
"""

from collections.abc import Iterator
from copy import copy, deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plaudit.data.templates import ChatTemplate
from plaudit.models.classifier import load_classifier, scores_of, set_pad_token
from plaudit.models.folder import require_same_tokens
from plaudit.models.logprobs import target_states
from plaudit.models.scalar import VALUE_HEAD, read_value_head
from plaudit.models.trainable import TrainableModel
from plaudit.recipe import ModelSettings
from plaudit.types import Batch

# A model of its own --------------------------------------------------------------------------------------------------


def target_values(model: nn.Module, batch: Batch) -> Tensor:
    """V of each token that `batch.loss_mask_T` marks, given what stands before it; in order, in fp32 or finer."""
    return scores_of(model, target_states(model, batch))


def load_critic(recipe: ModelSettings, template: ChatTemplate, device: torch.device, *, seed: int = 0) -> TrainableModel:
    """The recipe's critic, ready to train."""
    require_same_tokens(recipe.path, template.tokenizer, "critic", trust_remote_code=recipe.trust_remote_code)
    # A copy: we pad nothing, but whoever scores several texts with the saved one does; what pads the policy's is not ours to say.
    template = copy(template)
    template.tokenizer = deepcopy(template.tokenizer)
    critic = load_classifier(recipe, template, device, seed=seed, head_std=0.0, section="critic")
    set_pad_token(critic, [] if template.end_token is None else [template.end_token])
    return critic


# A head on the policy's layers ---------------------------------------------------------------------------------------


class SharedCritic:
    """The head alone: the layers are the policy's, and are saved with it."""

    def __init__(self, policy: TrainableModel, path: str):
        """`path`: the policy's folder. A value head that lies in it is the start."""
        hidden = policy.model.config.get_text_config().hidden_size
        self.model = nn.Linear(hidden, 1, bias=False, device=policy.device, dtype=torch.float32)
        known = read_value_head(path, hidden)
        with torch.no_grad():
            self.model.weight.zero_() if known is None else self.model.weight.copy_(known[0])

    @property
    def device(self) -> torch.device:
        return self.model.weight.device

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def values(self, hidden_ND: Tensor, *, coefficient: float = 0.0) -> Tensor:
        """V of each token, given the policy's hidden state before it. What the values' gradient counts in the policy's layers is
        scaled by the coefficient; in the head it counts whole."""
        hidden_ND = hidden_ND.to(self.model.weight.dtype)
        # d + c · (h − d) is h, and its gradient is c.
        hidden_ND = torch.lerp(hidden_ND.detach(), hidden_ND, coefficient) if coefficient else hidden_ND.detach()
        return self.model(hidden_ND)[:, 0]

    def save(self, folder: Path) -> None:
        """As LLaMA-Factory saves one: put beside the policy's weights, it makes of them a scalar reward model, or a critic."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"v_head.summary.weight": self.model.weight.detach().contiguous()}, folder / VALUE_HEAD)
