"""AdamW on fp32 weights, whatever the model's own dtype.

A bf16 model's gradients are added up in fp32, micro-batch by micro-batch, on master weights that the optimiser owns; after a step
the masters are copied into the model in place, so its tensors keep their addresses. An fp32 model's masters are its own tensors.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plaudit.errors import RunError
from plaudit.recipe import Optim

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def resident_bytes(parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
    """What an optimiser of these keeps between updates: two moments, and a master where the weight itself is none."""
    return sum(p.numel() * (8 if p.dtype == torch.float32 else 12) for _, p in parameters)


class Optimiser:
    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim):
        self.parameters = dict(named_parameters)
        assert self.parameters, "nothing to train"
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = parameter if parameter.dtype == torch.float32 else _follow(parameter)
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )
        self.max_grad_norm = optim.max_grad_norm

    def clip(self) -> Tensor:
        """Scales gradients down to max_grad_norm; returns the norm they had (not finite if any of them is not)."""
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.max_grad_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self._publish()

    def forget_gradients(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def _publish(self) -> None:
        followers = [name for name, parameter in self.parameters.items() if self.masters[name] is not parameter]
        if followers:
            copies, masters = [self.parameters[n] for n in followers], [self.masters[n] for n in followers]
            torch._foreach_copy_(copies, masters)  # pyright: ignore

    # What a checkpoint holds

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, and every fp32 weight."""
        tensors = {f"weight/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for moment in MOMENTS:
                if moment in self.adamw.state[master]:
                    tensors[f"{moment}/{name}"] = self.adamw.state[master][moment]
        return tensors

    @torch.no_grad()
    def load_state(self, parts: Iterable[dict[str, Tensor]]) -> None:
        """What `state` gave, in any number of parts. Every weight must come, with all of its moments or none."""
        self.adamw.state.clear()
        missing = {f"weight/{name}" for name in self.masters}
        for part in parts:
            missing -= part.keys()
            for key, tensor in part.items():
                kind, _, name = key.partition("/")
                master = self.masters[name]
                if kind == "weight":
                    master.copy_(tensor)
                else:
                    self.adamw.state[master][kind] = tensor.to(master.device)
        if missing or any(len(moments) != len(MOMENTS) for moments in self.adamw.state.values() if moments):
            raise RunError(f"the saved trainer state is not whole: {min(missing, default='moments')} is missing")
        self._publish()


def _follow(parameter: nn.Parameter) -> Tensor:
    """A master for the parameter, to which its gradients move as soon as they are made."""
    master = parameter.detach().float().requires_grad_()

    def move_gradient(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)
    return master
