"""AdamW on fp32 weights, whatever the model's own dtype.

A bf16 model's gradients are accumulated in fp32, micro-batch by micro-batch, for master weights owned by the optimiser; after a
step the masters are copied into the model in place, so its tensors keep their addresses. An fp32 model's parameters are their own
masters.

With `optim.placement: offload`, masters and moments live in host memory and are streamed through the device in every step
(train/offload.py). Gradients stay on the device: they exist only during an update, their norm must be known before the first of
them is used, and every micro-batch adds to all of them. On a CPU, host and device memory are the same and offload has no effect.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from plaudit.errors import RunError
from plaudit.models.weights import has_device_memory
from plaudit.recipe import OptimSettings
from plaudit.train.offload import HostState, StateSlice
from plaudit.world import World

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimiser:
    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimSettings):
        self.parameters = dict(named_parameters)
        assert self.parameters, "nothing to train"
        self.optim = optim
        device = next(iter(self.parameters.values())).device
        followers = {name: p.shape for name, p in self.parameters.items() if p.dtype != torch.float32}
        others = {name: p.shape for name, p in self.parameters.items() if name not in followers}
        self._host = HostState(followers, others, device) if optim.placement == "offload" and has_device_memory(device) else None
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = parameter if name in others else self._master(name, parameter.detach())
        self._moments: dict[str, dict[str, Tensor]] = {}
        """Only for parameters that have had a gradient."""
        self._sums: dict[str, Tensor] = {}
        """fp32 gradients of parameters that are not their own masters."""
        for name in followers:
            self._follow(name)

    @property
    def resident_bytes(self) -> int:
        """Memory kept on the device between updates: two moments, and a master where the parameter is not its own."""
        if self._host is not None:
            return 0
        return sum(p.numel() * (8 if self.masters[name] is p else 12) for name, p in self.parameters.items())

    def clip(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns their norm before clipping (not finite if any gradient is not)."""
        gradients = list(self.gradients().values())
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.optim.max_grad_norm is not None and gradients:
            # Unconditionally: checking whether clipping is needed would synchronise with the device.
            torch._foreach_mul_(gradients, (self.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        gradients = self.gradients()
        for name in gradients:
            if name not in self._moments:
                self._moments[name] = self._new_moments(name)
        if self._host is not None:
            self._step_through_the_device(self._host, gradients, lr)
            return
        masters, moments = [self.masters[name] for name in gradients], [self._moments[name] for name in gradients]
        self._adamw(
            list(gradients), masters, list(gradients.values()), *([own[kind] for own in moments] for kind in MOMENTS), lr=lr
        )
        self._publish()

    def sum_gradients(self, world: World) -> None:
        """Sum over processes, in place. A parameter without a gradient in any process keeps none, or its weight would decay; one
        without a gradient only in this process (fewer micro-batches than processes) counts as zero here."""
        if world.size == 1:
            return
        own, names = self.gradients(), list(self.parameters)
        somewhere = world.any_true([name in own for name in names])
        wanted = [name for name, present in zip(names, somewhere, strict=True) if present]
        world.sum_in_place([own[name] if name in own else self._zero_gradient(name) for name in wanted])

    def _zero_gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        zeros = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if self.masters[name] is parameter:
            parameter.grad = zeros
        else:
            self._sums[name] = zeros
        return zeros

    def clear_gradients(self) -> None:
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    # A step

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of the parameters that have one; may be changed in place."""
        found = ((name, self._sums.get(name) if self.masters[name] is not p else p.grad) for name, p in self.parameters.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    def _adamw(
        self, names: Sequence[str], masters: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], *, lr: float,
    ) -> None:  # fmt: skip
        """Update parameters or slices of them. Matrices decay, biases and norms do not. `steps` are incremented."""
        for decays in (True, False):
            some = [i for i, name in enumerate(names) if (self.parameters[name].ndim >= 2) == decays]
            adamw(
                [masters[i] for i in some],
                [gradients[i] for i in some],
                [exp_avgs[i] for i in some],
                [exp_avg_sqs[i] for i in some],
                [],
                [steps[i] for i in some],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                beta1=self.optim.betas[0],
                beta2=self.optim.betas[1],
                eps=self.optim.eps,
                weight_decay=self.optim.weight_decay if decays else 0.0,
            )

    def _step_through_the_device(self, host: HostState, gradients: dict[str, Tensor], lr: float) -> None:
        device = next(iter(self.parameters.values())).device
        if not gradients:
            return
        # One copy of all step counts; every slice of a parameter starts from the same count.
        before = torch.stack([self._moments[name]["step"] for name in gradients]).to(device)
        places = {name: i for i, name in enumerate(gradients)}

        def work(pieces: Sequence[StateSlice]) -> None:
            pieces = [piece for piece in pieces if piece.name in gradients]
            weights = [self.parameters[piece.name].detach().view(-1)[piece.at] for piece in pieces]
            masters = [weight if piece.master is None else piece.master for piece, weight in zip(pieces, weights, strict=True)]
            counts = before.clone().unbind()
            self._adamw(
                [piece.name for piece in pieces],
                masters,
                [gradients[piece.name].reshape(-1)[piece.at] for piece in pieces],
                [piece.exp_avg for piece in pieces],
                [piece.exp_avg_sq for piece in pieces],
                [counts[places[piece.name]] for piece in pieces],
                lr=lr,
            )
            following = [i for i, piece in enumerate(pieces) if piece.master is not None]
            if following:
                torch._foreach_copy_([weights[i] for i in following], [masters[i] for i in following])  # pyright: ignore

        host.stream_through_device(work)
        for name in gradients:
            self._moments[name]["step"] += 1

    def _publish(self) -> None:
        followers = [name for name, parameter in self.parameters.items() if self.masters[name] is not parameter]
        if followers:
            copies, masters = [self.parameters[n] for n in followers], [self.masters[n] for n in followers]
            torch._foreach_copy_(copies, masters)  # pyright: ignore

    # Optimiser state

    def _master(self, name: str, weight: Tensor) -> Tensor:
        return weight.float() if self._host is None else self._host.master(name).copy_(weight)

    def _new_moments(self, name: str) -> dict[str, Tensor]:
        if self._host is None:
            master = self.masters[name].detach()
            moments = torch.zeros_like(master), torch.zeros_like(master)
        else:
            moments = self._host.moments(name)
            for moment in moments:
                moment.zero_()
        return dict(zip(MOMENTS, (*moments, torch.zeros((), device=moments[0].device)), strict=True))

    def _follow(self, name: str) -> None:
        """Move the parameter's gradients into the master's sum as soon as they are computed."""
        sums = self._sums  # the hook must not refer to the optimiser: a reference cycle

        def move_gradient(p: Tensor) -> None:
            assert p.grad is not None
            if name in sums:
                sums[name] += p.grad
            else:
                sums[name] = p.grad.float()
            p.grad = None

        self.parameters[name].register_post_accumulate_grad_hook(move_gradient)

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, and every fp32 weight."""
        if self._host is not None:
            self._host.settled()
        tensors = {f"weight/{name}": master.detach() for name, master in self.masters.items()}
        for name in self.masters:
            tensors |= {f"{kind}/{name}": tensor for kind, tensor in self._moments.get(name, {}).items()}
        return tensors

    @torch.no_grad()
    def load_state(self, parts: Iterable[dict[str, Tensor]]) -> None:
        """Load what `state` returned, in any number of chunks. Every weight must be there, with all of its moments or none."""
        self._moments.clear()
        missing = {f"weight/{name}" for name in self.masters}
        for part in parts:
            missing -= part.keys()
            for key, tensor in part.items():
                kind, _, name = key.partition("/")
                if name not in self.masters:
                    raise RunError(f"the saved trainer state has {name}, and this model trains no such weight: start a new run")
                if kind == "weight":
                    self.masters[name].copy_(tensor)
                    continue
                if name not in self._moments:
                    self._moments[name] = self._new_moments(name)
                    missing |= {f"{moment}/{name}" for moment in MOMENTS}
                self._moments[name][kind].copy_(tensor)
                missing.discard(key)
        if missing:
            raise RunError(f"the saved trainer state is incomplete: {min(missing)} is missing")
        self._publish()
