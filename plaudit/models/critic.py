"""A critic: the expected return at every token.

    V_t = w · h_{t−1}        h_{t−1}: hidden state of the token before t, so V_t sees only the tokens before t

A critic may be a separate model: a sequence classifier with one label, in memory and on disk. It may start from a scalar reward
model, and a saved critic loads wherever one does (its score of a text is V after the text's last token). Or it may be a head on the
policy's own layers, so that one pass gives both log-probs and values. A new head starts at 0: the first values are 0 rather than
noise, and an untrained head does not move the policy's layers.
"""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plaudit.data.templates import ChatTemplate
from plaudit.models.classifier import load_classifier, scores_of, set_pad_token
from plaudit.models.folder import require_same_tokens
from plaudit.models.host_memory import HostMemory
from plaudit.models.logprobs import target_states
from plaudit.models.scalar import VALUE_HEAD, read_value_head
from plaudit.models.sharded import in_forward_pass
from plaudit.models.trainable import TrainableModel
from plaudit.recipe import ModelSettings
from plaudit.types import Batch

# A separate model ----------------------------------------------------------------------------------------------------


@in_forward_pass
def target_values(model: nn.Module, batch: Batch) -> Tensor:
    """V of each token marked by `batch.loss_mask_T`, given the tokens before it; in order, in fp32 or finer."""
    return scores_of(model, target_states(model, batch))


def load_critic(recipe: ModelSettings, template: ChatTemplate, device: torch.device, *, seed: int = 0) -> TrainableModel:
    """The recipe's critic, ready to train."""
    require_same_tokens(recipe.path, template.tokenizer, "critic", trust_remote_code=recipe.trust_remote_code)
    # A copy: users of the saved critic may score padded batches, but the policy's padding token must not change.
    template = copy(template)
    template.tokenizer = deepcopy(template.tokenizer)
    critic = load_classifier(recipe, template, device, seed=seed, head_std=0.0, section="critic")
    set_pad_token(critic, [] if template.end_token is None else [template.end_token])
    return critic


# A head on the policy's layers ---------------------------------------------------------------------------------------


class SharedCritic:
    """The head alone; the layers are the policy's and are saved with it."""

    def __init__(self, policy: TrainableModel, path: str):
        """`path`: the policy's folder. If it contains a value head, the head starts from it."""
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
        """V of each token, from the policy's hidden state before it. The gradient of the values into the policy's layers is scaled
        by `coefficient`; the head gets the full gradient."""
        hidden_ND = hidden_ND.to(self.model.weight.dtype)
        # d + c · (h − d) equals h, and its gradient is c.
        hidden_ND = torch.lerp(hidden_ND.detach(), hidden_ND, coefficient) if coefficient else hidden_ND.detach()
        return self.model(hidden_ND)[:, 0]

    def saved_bytes(self) -> int:
        return self.model.weight.numel() * self.model.weight.element_size()

    def save(self, folder: Path | None) -> None:
        """In LLaMA-Factory's format: next to the policy's weights, it makes them a scalar reward model or a critic."""
        if folder is not None:
            self.snapshot(None, keep=True)(folder)

    def snapshot(self, memory: HostMemory | None, *, keep: bool) -> Callable[[Path], None]:
        """As that of a model; its weight is not sharded."""
        weight = self.model.weight.detach().contiguous()
        if memory is not None and keep:
            weight = memory.copies("model", {VALUE_HEAD: weight})[VALUE_HEAD]

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({"v_head.summary.weight": weight}, folder / VALUE_HEAD)

        return write
