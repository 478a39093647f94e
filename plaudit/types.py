"""The data types shared between rooms, and nothing else.

Shape suffixes, here and everywhere: T tokens of a packed batch, N target tokens among them, S sequences, B sequences being
sampled, D hidden size, V vocabulary, G samples of a group, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plaudit.redaction import redact

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""`role` and `content`, plus any other keys the chat template reads (`tool_calls`, `reasoning_content`, `name`)."""

TOKEN_BYTES = 32
"""Of the secret by which processes of a run know each other."""


@dataclass(frozen=True)
class RewardWorkers:
    """Processes of a run alongside its ranks, each with one reward model, and where they answer the ranks' calls."""

    token: bytes
    """Random, and known to the processes of this run only."""
    addresses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools the template may show."""

    messages: list[Message]
    tools: list[Any] | None = None
    train_from: int = 0
    """Assistant turns before this message are not trained on: in a preference pair, the shared history."""


@dataclass(frozen=True)
class Prompt:
    """One row to sample from: the policy's input, and the data its rewards need."""

    id: str
    messages: list[Message]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    is_text: bool = False
    """The row's prompt is plain text, which became a user message."""


@dataclass(frozen=True)
class Sample:
    """One sampled response. Arrays have one entry per response token, including the end token."""

    prompt_id: str
    index: int
    """Index among the prompt's samples."""
    tokens: np.ndarray
    text: str
    """Without special tokens. A stop string is kept: the policy wrote it."""
    status: Literal["finished", "truncated"]
    sampler_logprobs: np.ndarray
    """Of logits / temperature, as the sampler computed them; not renormalised after top-p or top-k."""
    untempered_logprobs: np.ndarray | None
    """At temperature 1: a metric, never trained on. None from an engine that does not compute them."""
    version: int
    """Version of the weights that sampled it: the number of training steps they have had."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int | None:
        """Length of the response in tokens; None if unknown."""
        return len(self.tokens)


@dataclass(frozen=True)
class SavedSample(Sample):
    """A response read from a file: its text, and its token count and answer if the file has them."""

    token_count: int | None = None
    answer: str | None = None
    """Its answer without its thoughts, if the file has them apart. Empty if it has none."""

    @property
    def num_tokens(self) -> int | None:
        return self.token_count


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in order of index. A reward always sees the full group."""

    prompt: Prompt
    prompt_tokens: np.ndarray
    samples: tuple[Sample, ...]


LARGEST_REWARD = 1e15
"""Of a reward, weighted or not: squares of much larger values overflow in fp32, and then a whole step has no advantages."""


@dataclass(frozen=True)
class Failure:
    """Why a reward returned no value: always the reward's fault, never the policy's."""

    cause: str
    """One word for counting: timeout, exception, not_a_number, too_large, died, …"""
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact(self.message))  # messages end up in samples, logs and bug reports


@dataclass(frozen=True)
class Score:
    """A reward's result for a sample: a value with its parts, or a failure, never a silent zero. Neither: it does not apply."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    malformed: bool = False
    """The policy's fault (no answer to be found, broken thoughts): scored with a stated value, never dropped."""
    failure: Failure | None = None
    view: str | None = None
    """The string that was scored."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """How the value came about: a judge's prompt and answer."""
    unjudged: bool = False
    """There was nothing to compare it with, so it was not judged: it gets the recipe's `malformed` value, if one is set."""
    transient: bool = False
    """Valid for now but may differ later (a server's length limit), so it is not cached."""

    @property
    def applies(self) -> bool:
        """Whether the reward applies to the sample: its `when` matches, its gate is open, and it has not declined."""
        return self.value is not None or self.failure is not None


DECLINED = Score(None)
"""The reward itself says that it does not apply to the sample, as a function for TRL does with None."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group with what its rewards say of each sample: together, and each by its name."""

    group: Group
    scores: tuple[Score, ...]
    by_reward: Mapping[str, tuple[Score, ...]]
    baseline: Score | None = None
    """Of one more sample, the greedy one, where advantages are taken against it (ReMax). It is not trained on."""


@dataclass(frozen=True)
class Example:
    """One tokenised sequence to train on. `loss_mask[t]`: whether token t is a target; the first token never is."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Experience(Example):
    """A scored sample after its prompt, ready to train on. Arrays have one entry per target token, in order."""

    reward: float
    """Of the whole sample."""
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    old_logprobs: np.ndarray | None = None
    """Of the policy at the start of the step; None in a step with one update, where they are the policy's own."""
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    """The critic's predictions at the start of the step."""
    returns: np.ndarray | None = None
    """What the critic is trained to predict."""
    entropies: np.ndarray | None = None
    """Of the policy at the start of the step, to look at; None where they are not computed."""


@dataclass(frozen=True)
class Pair:
    """Two tokenised sequences; the chosen one is preferred."""

    chosen: Example
    rejected: Example
    margin: float = 0.0
    """How much better the chosen one is, if the data say so."""
    ref_chosen: float = 0.0
    """Log-prob of the chosen answer under DPO's reference, summed over its target tokens."""
    ref_rejected: float = 0.0

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PairTargets:
    """Per-pair data of a batch, in the order of its pairs."""

    num_targets: tuple[int, ...]
    """Target tokens of each sequence: chosen, rejected, chosen, …"""
    margins_P: torch.Tensor
    ref_chosen_P: torch.Tensor
    ref_rejected_P: torch.Tensor


@dataclass(frozen=True)
class Targets:
    """RL data of a batch, one entry per target token, in order."""

    weights_N: torch.Tensor
    advantages_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor | None
    ref_logprobs_N: torch.Tensor | None
    positive_weights_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None


@dataclass(frozen=True)
class SharedPrompts:
    """Where the S sequences of a batch find their keys, if tokens with which several of them begin are in the batch only once. A
    sequence's keys, all its tokens in order, are then more than its own tokens: U in all, of T tokens."""

    keys_U: torch.Tensor
    """The place of each key's token in the batch."""
    starts_S1: torch.Tensor
    """Cumulative starts of the sequences' keys, int32."""
    longest: int
    predictors_N: torch.Tensor
    """The place of the token before each target."""
    copies_U: torch.Tensor
    """The keys by token: those of token t are copies_U[copy_starts_T1[t] : copy_starts_T1[t + 1]], ascending; both int32."""
    copy_starts_T1: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end without padding: one micro-batch, as the model sees it."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    """Position of each token in its own sequence."""
    loss_mask_T: torch.Tensor
    starts_S1: torch.Tensor
    """Cumulative sequence starts, int32: S + 1 entries, the last one is the total length."""
    longest: int
    places_N: torch.Tensor | None = None
    """Where the targets are; looked up in the loss mask if it is not given, which waits for the device."""
    shared: SharedPrompts | None = None
    """A sequence may begin with tokens of an earlier one; it then has only its other tokens here, at least one."""
    targets: Targets | None = None
    """RL only: advantages and log-probs of the target tokens."""
    pairs: PairTargets | None = None
    """Preference data only: sequences 2i and 2i + 1 are the chosen and the rejected one of pair i."""
    has_signal: bool = True
    """False: the gradient of its loss is 0, and the loss is computed for its metrics alone."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def predictors_N(self) -> torch.Tensor:
        """The place of the token before each target: its hidden state predicts the target."""
        return self._places_N - 1 if self.shared is None else self.shared.predictors_N

    @property
    def target_tokens_N(self) -> torch.Tensor:
        return self.tokens_T[self._places_N]

    @property
    def _places_N(self) -> torch.Tensor:
        return self.loss_mask_T.nonzero()[:, 0] if self.places_N is None else self.places_N

    @property
    def target_lengths_S(self) -> torch.Tensor:
        """Number of target tokens of each sequence."""
        targets_T = self.loss_mask_T.long()
        before_T1 = targets_T.new_zeros(len(targets_T) + 1)
        before_T1[1:] = targets_T.cumsum(0)
        return before_T1[self.starts_S1.long()].diff()

    @property
    def num_targets(self) -> int:
        return int(self.loss_mask_T.sum())
