"""The service's metrics in Prometheus' text format."""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from plaudit.rewards.client import RewardClient
from plaudit.types import Score

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of the latency histogram, from rules to slow judges."""
TOTAL = "total"
Labels = Mapping[str, str]


class Metrics:
    """Counters of requests and scores; those kept by the rewards themselves are only read here."""

    def __init__(self, clients: Sequence[RewardClient], amounts: Callable[[], Mapping[str, Mapping[str, float]]]):
        """`amounts`: each model's calls, tokens and cost so far."""
        self._amounts = amounts
        self.in_flight = self.connections = 0
        self.closed_connections: Counter[str] = Counter()
        """Closed by us, by cause."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self.samples = self.malformed = 0
        self._clients = clients
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS_S) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._without_value: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def count_request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self._buckets[path][bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds[path] += seconds

    def count_scores(self, scores: Iterable[Score]) -> None:
        labels = {client.reward.label for client in self._clients}
        for score in scores:
            self.samples += 1
            self.malformed += score.malformed
            if score.value is None:
                self._without_value[score.failure.cause if score.failure else "unknown"] += 1
            else:
                self._add(TOTAL, score.value)
            for name, value in score.parts.items():
                if name in labels:
                    self._add(f"reward:{name}", value)

    def _add(self, name: str, value: float) -> None:
        if math.isfinite(value):  # an infinite part of weight 0 would spoil the mean for good
            self._sums[name] += value
            self._counts[name] += 1

    # Exposition -------------------------------------------------------------------------------------------------------

    def text(self, state: str) -> str:
        return "".join([*self._requests(state), *self._samples(), *self._rewards(), *self._models()])

    def _requests(self, state: str) -> Iterator[str]:
        states = [({"state": name}, float(name == state)) for name in ("starting", "ready", "stopping")]
        yield _family("plaudit_state", "gauge", "1 for the current state of the service.", states)
        yield _family("plaudit_in_flight", "gauge", "Score requests in flight.", [({}, self.in_flight)])
        yield _family("plaudit_connections", "gauge", "Open connections.", [({}, self.connections)])
        closed = [({"cause": cause}, count) for cause, count in sorted(self.closed_connections.items())]
        yield _family("plaudit_connections_closed_total", "counter", "Connections closed because of a limit, by cause.", closed)
        counts = [({"path": path, "status": str(status)}, count) for (path, status), count in sorted(self.requests.items())]
        yield _family("plaudit_requests_total", "counter", "Requests by path and status; 499: the client disconnected.", counts)
        lines = ["# HELP plaudit_request_seconds Request latency.\n# TYPE plaudit_request_seconds histogram\n"]
        for path, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), buckets, strict=True):
                total += count
                lines.append(_line("plaudit_request_seconds_bucket", {"path": path, "le": bound}, total))
            lines.append(_line("plaudit_request_seconds_sum", {"path": path}, self._seconds[path]))
            lines.append(_line("plaudit_request_seconds_count", {"path": path}, total))
        yield "".join(lines)

    def _samples(self) -> Iterator[str]:
        yield _family("plaudit_samples_total", "counter", "Responses scored.", [({}, self.samples)])
        yield _family("plaudit_samples_malformed_total", "counter", "Malformed responses.", [({}, self.malformed)])
        causes = [({"cause": cause}, count) for cause, count in sorted(self._without_value.items())]
        yield _family("plaudit_samples_without_value_total", "counter", "Responses without a total, by cause.", causes)
        mean = [({}, self._sums[TOTAL] / self._counts[TOTAL])] if self._counts[TOTAL] else []
        yield _family("plaudit_total_mean", "gauge", "Mean of all totals so far.", mean)
        yield _family("plaudit_total_sum", "gauge", "Sum of all totals so far.", [({}, self._sums[TOTAL])])
        yield _family("plaudit_total_count", "counter", "Number of totals so far.", [({}, self._counts[TOTAL])])

    def _rewards(self) -> Iterator[str]:
        counts = {client.reward.label: dict(client.counts) for client in self._clients}  # a copy: counted on another thread
        named = [(label, f"reward:{label}") for label in counts if self._counts[f"reward:{label}"]]
        means = [({"reward": label}, self._sums[name] / self._counts[name]) for label, name in named]
        yield _family("plaudit_reward_mean", "gauge", "Mean of a reward's part so far, before its weight.", means)
        sums = [({"reward": label}, self._sums[name]) for label, name in named]
        yield _family("plaudit_reward_sum", "gauge", "Sum of a reward's part so far.", sums)
        numbers = [({"reward": label}, self._counts[name]) for label, name in named]
        yield _family("plaudit_reward_count", "counter", "Responses with a value of the reward.", numbers)
        for key, help in (
            ("calls", "Calls of a reward: one for each group, or for each slice of a large one."),
            ("retries", "Retried responses."),
            ("cached", "Responses scored from the cache."),
        ):
            values = [({"reward": label}, count.get(key, 0)) for label, count in counts.items()]
            yield _family(f"plaudit_reward_{key}_total", "counter", help, values)
        failures = [
            ({"reward": label, "cause": key.removeprefix("failed: ")}, number)
            for label, count in counts.items()
            for key, number in sorted(count.items())
            if key.startswith("failed: ")
        ]
        yield _family("plaudit_reward_failures_total", "counter", "Responses that a reward failed on, by cause.", failures)
        seconds = [({"reward": client.reward.label}, client.seconds) for client in self._clients]
        yield _family("plaudit_reward_seconds_total", "counter", "Time in calls, summed over concurrent ones.", seconds)

    def _models(self) -> Iterator[str]:
        usage = {name: amounts for name, amounts in self._amounts().items() if "/" not in name}  # with "/": a reward's share
        for key, help in (
            ("calls", "Calls of a model, including retries."),
            ("retries", "Retried calls of a model."),
            ("prompt_tokens", "Prompt tokens of a model."),
            ("new_tokens", "Generated tokens of a model."),
            ("cost", "Cost of a model's tokens, if prices are set."),
        ):
            values = [({"model": name}, amounts[key]) for name, amounts in usage.items() if key in amounts]
            yield _family(f"plaudit_model_{key}_total", "counter", help, values)


def _family(name: str, kind: str, help: str, values: Iterable[tuple[Labels, float]]) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n" + "".join(_line(name, labels, value) for labels, value in values)


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value:.17g}\n" if pairs else f"{name} {value:.17g}\n"


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
