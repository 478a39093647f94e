"""`limits` of a reward: concurrency, rates, time limits and retries, all in one section.

A reward scores *groups*. Kinds that make *calls* to do so (a request to a model's server, a call of a user's function) limit each
call as well. One call is made in one or more *attempts*.
"""

from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from plaudit.recipe.section import Section

MIN_ANSWER_S = 120.0
SLOWEST_TOKENS_PER_S = 20


class Limits(Section):
    """How fast a reward scores groups, and when it is given up. Kinds that make calls add the limits of a call."""

    max_concurrent_groups: PositiveInt | None = None
    """Groups scored at the same time; null for no limit."""
    groups_per_s: PositiveFloat | None = None
    """Groups started per second; null for no limit."""
    group_timeout_s: PositiveFloat | None = None
    """Time limit for scoring one group; null for none. Kinds that make calls also limit each call (timeout_s)."""
    group_retries: NonNegativeInt = 0
    """How often the failed samples of a group are scored again."""
    group_backoff_s: NonNegativeFloat = 0.5
    """Wait before the first of these; it doubles with each further one."""
    give_up_after: PositiveInt | None = 10
    """After this many groups in a row in which every sample failed, further groups fail at once until pause_s have passed; null
    for never."""
    pause_s: NonNegativeFloat = 30.0
    """How long a reward that was given up is paused before one group tries it again."""


class ModelLimits(Limits):
    """Adds the limits of calls to a model on a server."""

    max_concurrent_calls: PositiveInt = 512
    """placement: server or launch. Calls in flight at the same time, to all replicas together."""
    calls_per_s: PositiveFloat | None = None
    """placement: server or launch. Calls started per second, retries included; null for no limit."""
    tokens_per_minute: PositiveInt | None = None
    """placement: server or launch. Tokens per minute, of prompts and answers together: calls wait while the last minute's are used
    up; null for no limit."""
    connect_timeout_s: PositiveFloat = 10.0
    """placement: server or launch. Time limit for opening a connection."""
    attempt_timeout_s: PositiveFloat | None = None
    """placement: server or launch. Time limit for one attempt of a call; default: what is left of timeout_s."""
    timeout_s: PositiveFloat | None = None
    """placement: server or launch. Time limit for one call with all its attempts; waiting for a free slot does not count. Default:
    120 s, or the time max_new_tokens take at 20 tokens/s if that is longer."""
    start_timeout_s: PositiveFloat = 500.0
    """placement: launch. Time limit for the server to start."""
    sleep_timeout_s: PositiveFloat = 120.0
    """placement: launch with model.sleep. Time limit for the server to go to sleep, and to wake."""
    restarts: NonNegativeInt = 3
    """placement: launch. How often the server may be started again in a run, after it died or fell silent."""
    max_answer_bytes: PositiveInt = 4 * 2**20
    """placement: server or launch. Longest response that is read, after decompression; a longer one is a failure (too_large)."""
    retries: NonNegativeInt = 4
    """placement: server or launch. Further attempts of a call that failed in a way that may be temporary."""
    backoff_s: NonNegativeFloat = 0.5
    """placement: server or launch. Wait before the first of these, less up to half of it at random; it doubles with each further
    one."""

    server_only: ClassVar[tuple[str, ...]] = (
        "max_concurrent_calls", "calls_per_s", "tokens_per_minute", "connect_timeout_s", "attempt_timeout_s", "timeout_s",
        "start_timeout_s", "sleep_timeout_s", "restarts", "max_answer_bytes", "retries", "backoff_s",
    )  # fmt: skip
    """Limits without effect on a model in this process, whose calls are batched and cannot hang."""
    launch_only: ClassVar[tuple[str, ...]] = ("start_timeout_s", "sleep_timeout_s", "restarts")
    shared: ClassVar[tuple[str, ...]] = server_only
    """Limits of the connections, in which rewards with the same model must agree."""

    def call_timeout_s(self, max_new_tokens: int = 0) -> float:
        return max(MIN_ANSWER_S, max_new_tokens / SLOWEST_TOKENS_PER_S) if self.timeout_s is None else self.timeout_s


class JudgeLimits(ModelLimits):
    """Adds the retries of answers that cannot be parsed."""

    unreadable_retries: NonNegativeInt = 2
    """How often another answer is requested when one cannot be parsed, or when its call failed."""
    retry_temperature: NonNegativeFloat = 1.0
    """Temperature of those answers."""

    # A generating model's time limit is set with each call, because it depends on max_new_tokens.
    shared: ClassVar[tuple[str, ...]] = tuple(name for name in ModelLimits.shared if name != "timeout_s")
