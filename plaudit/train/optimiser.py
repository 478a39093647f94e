"""AdamW on fp32 weights, whatever the model's own dtype.

A bf16 model's gradients are accumulated in fp32, micro-batch by micro-batch, for master weights owned by the optimiser; after a
step the masters are copied into the model in place, so its tensors keep their addresses. An fp32 model's parameters are their own
masters. Of several processes each may own the state of some pieces of the parameters only: train/gradients.py.

With `optim.placement: offload`, masters and moments live in host memory and are streamed through the device in every step
(train/offload.py). Gradients stay on the device: they exist only during an update, their norm must be known before the first of
them is used, and every micro-batch adds to all of them. On a CPU, host and device memory are the same and offload has no effect.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from plaudit.errors import RunError
from plaudit.models.weights import has_device_memory
from plaudit.recipe import OptimSettings
from plaudit.train.gradients import Piece, collect_gradients, parse_key
from plaudit.train.offload import HostState, StateSlice
from plaudit.train.saved_state import SavedTensor
from plaudit.world import World

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimiser:
    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim: OptimSettings,
        world: World | None = None,
        *,
        sharded: bool = False,
    ):
        """`world`: the processes that train together, None for one. `sharded`: each of them has a part of the state."""
        parameters = dict(named_parameters)
        self.optim = optim
        self.gradients = collect_gradients(parameters.items(), world or World.alone(), sharded=sharded)
        self.pieces = self.gradients.pieces
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._pieces_of: dict[str, list[tuple[str, Piece]]] = {name: [] for name in parameters}
        for key, piece in self.pieces.items():
            self._pieces_of[piece.name].append((key, piece))
        device = next(iter(parameters.values())).device
        followers = {key: piece.weight.shape for key, piece in self.pieces.items() if piece.weight.dtype != torch.float32}
        others = {key: piece.weight.shape for key, piece in self.pieces.items() if key not in followers}
        offload = optim.placement == "offload" and has_device_memory(device)
        self._host = HostState(followers, others, device) if offload else None
        self.masters: dict[str, Tensor] = {}
        """fp32 weights; an fp32 model's own."""
        for key, piece in self.pieces.items():
            self.masters[key] = piece.weight if key in others else self._master(key, piece.weight.detach())
        self._moments: dict[str, dict[str, Tensor]] = {}
        """Only for pieces that have had a gradient."""
        self._device = device

    @property
    def resident_bytes(self) -> int:
        """Memory kept on the device between updates: two moments, and a master where the parameter is not its own."""
        if self._host is not None:
            return 0
        return sum(piece.weight.numel() * (8 if self._is_own_master(key) else 12) for key, piece in self.pieces.items())

    def _is_own_master(self, key: str) -> bool:
        return self.masters[key] is self.pieces[key].weight

    def clip(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns their norm before clipping (not finite if any gradient is not)."""
        gradients, norm = list(self.gradients.sums().values()), self.gradients.norm()
        if self.optim.max_grad_norm is not None and gradients:
            # Unconditionally: checking whether clipping is needed would synchronise with the device.
            torch._foreach_mul_(gradients, (self.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        gradients = self.gradients.sums()
        for key in gradients:
            if key not in self._moments:
                self._moments[key] = self._new_moments(key)
        if self._host is not None:
            self._step_through_the_device(self._host, gradients, lr)
        else:
            masters, moments = [self.masters[key] for key in gradients], [self._moments[key] for key in gradients]
            self._adamw(
                list(gradients), masters, list(gradients.values()), *([own[kind] for own in moments] for kind in MOMENTS), lr=lr
            )
            self._copy_masters()
        self.gradients.publish()

    # A step

    def _adamw(
        self, keys: Sequence[str], masters: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], *, lr: float,
    ) -> None:  # fmt: skip
        """Update pieces or slices of them. `steps` are incremented."""
        for decays in (True, False):
            some = [i for i, key in enumerate(keys) if self.pieces[key].decays == decays]
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
        # Fused AdamW does not count its changes, by which merged adapters know that they are out of date (models/merged.py).
        increment_version(masters)

    def _step_through_the_device(self, host: HostState, gradients: dict[str, Tensor], lr: float) -> None:
        if not gradients:
            return
        # One copy of all step counts; every slice of a parameter starts from the same count.
        before = torch.stack([self._moments[name]["step"] for name in gradients]).to(self._device)
        places = {name: i for i, name in enumerate(gradients)}

        def work(pieces: Sequence[StateSlice]) -> None:
            pieces = [piece for piece in pieces if piece.name in gradients]
            weights = [self.pieces[piece.name].weight.detach().view(-1)[piece.at] for piece in pieces]
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

    def _copy_masters(self) -> None:
        """Into the model."""
        followers = [key for key in self.pieces if not self._is_own_master(key)]
        if followers:
            copies, masters = [self.pieces[key].weight for key in followers], [self.masters[key] for key in followers]
            torch._foreach_copy_(copies, masters)  # pyright: ignore

    # Optimiser state

    def _master(self, name: str, weight: Tensor) -> Tensor:
        return weight.float() if self._host is None else self._host.master(name).copy_(weight)

    def _new_moments(self, name: str) -> dict[str, Tensor]:
        if self._host is None:
            master = self.masters[name].detach()
            moments = torch.zeros_like(master), torch.zeros_like(master)
        else:
            moments = self._host.moments(name)  # zeros: `load_state` clears those that were used
        return dict(zip(MOMENTS, (*moments, torch.zeros((), device=moments[0].device)), strict=True))

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """fp32 weights and moments of this process's pieces, by what they are and the piece's key: `exp_avg/lm_head.weight`."""
        if self._host is not None:
            self._host.settled()
        tensors = {f"weight/{key}": master.detach() for key, master in self.masters.items()}
        for key in self.masters:
            tensors |= {f"{kind}/{key}": tensor for kind, tensor in self._moments.get(key, {}).items()}
        return tensors

    @torch.no_grad()
    def load_state(self, saved: Iterable[SavedTensor]) -> None:
        """Load the `state` of one or more processes, however it was divided among them. Every weight must be there, with all of its
        moments or none."""
        if self._host is not None:
            self._host.settled()  # otherwise the last step's moments could still arrive
            for name in self._moments:
                for moment in self._host.moments(name):
                    moment.zero_()
        self._moments.clear()
        loaded: Counter[tuple[str, str]] = Counter()
        for tensor in saved:
            kind, _, key = tensor.key.partition("/")
            name, begin, end = parse_key(key)
            if name not in self._sizes:
                raise RunError(f"the saved trainer state has {name}, and this model trains no such weight: start a new run")
            end = self._sizes[name] if end is None else end
            if kind != "step" and tensor.elements != end - begin:
                raise RunError(f"the saved trainer state has a {name} of another size: start a new run")
            for own, piece in self._pieces_of[name]:
                first, last = max(begin, piece.begin), min(end, piece.end)
                if first < last:
                    there = slice(0, 1) if kind == "step" else slice(first - piece.begin, last - piece.begin)
                    here = slice(0, 1) if kind == "step" else slice(first - begin, last - begin)
                    self._state_of(own, kind).view(-1)[there].copy_(tensor.read(here.start, here.stop))
                    loaded[own, kind] += last - first
        for key, piece in self.pieces.items():
            for kind in ("weight", *(MOMENTS if key in self._moments else ())):
                if loaded[key, kind] != piece.weight.numel():
                    raise RunError(f"the saved trainer state is incomplete: {kind}/{key} is missing")
        self._copy_masters()
        self.gradients.publish()

    def _state_of(self, key: str, kind: str) -> Tensor:
        if kind == "weight":
            return self.masters[key].detach()
        if key not in self._moments:
            self._moments[key] = self._new_moments(key)
        return self._moments[key][kind]
