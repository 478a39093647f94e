"""A step and a sample, as the pages show them."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from plaudit.redaction import redact
from plaudit.viewing.sources import NotThere, Source
from plaudit.viewing.step_summary import groups_of, outcomes, summarise

SHORT = 240
"""Characters of a prompt or response in a list."""
MAX_TEXT = 4 << 20
"""Characters of a text on a sample's page."""
MAX_SAMPLES = 8192
"""On a step's page; a step with more has several."""


def is_summary_column(name: str) -> bool:
    """What a step's page needs: not the judges' prompts and answers, nor the scored strings."""
    return not name.startswith(("view/", "trace/", "token/")) and name not in ("tools", "extra_info", "mean_logprob", "version")


def read_step(source: Source, split: str, step: int, row: int = 0) -> dict[str, Any]:
    """The groups and samples of a step, and its summary. Of a step with more than MAX_SAMPLES, the page that has this row."""
    table = source.read(split, step, is_summary_column)
    starts, _ = groups_of(table)
    pages = split_into_pages(starts, table.num_rows)
    page = next((page for page in pages if row in page), pages[0] if row == 0 else None)
    if page is None:
        raise NotThere(f"step {step} ({split}) has no sample number {row}")
    on_page, summary = table.slice(page.start, len(page)), summarise(table)
    samples, found = _short_samples(on_page, page.start), outcomes(on_page)
    shown = sorted({page.start, *(start for start in starts if start in page)}) if len(page) else []
    prompts = table.column("prompt").take(pa.array(shown, pa.int64())).to_pylist()
    groups = []
    for start, end, prompt in zip(shown, [*shown[1:], page.stop], prompts, strict=True):
        inside = slice(start - page.start, end - page.start)
        counts = {name: None if each is None else sum(each[inside]) for name, each in found.items()}
        group = _group_of(samples[inside]) | ({"signal": None} if summary["reward"] is None else {})
        groups.append({"row": start, **group, **counts, "prompt": _short(_last_message(prompt))})
    for sample in samples:
        del sample["prompt_id"], sample["data_source"]
    return {
        "split": split,
        "step": step,
        "summary": summary,
        "unit": "characters" if table.column("tokens").null_count == table.num_rows else "tokens",
        "first": page.start,
        "samples": samples,
        "groups": groups,
        "groups_before": sum(start < page.start for start in starts),
        "of_samples": table.num_rows,
        "of_groups": len(starts),
        "pages": [[each.start, each.stop] for each in pages],
    }


def split_into_pages(starts: Sequence[int], rows: int) -> list[range]:
    """Rows in pages of at most MAX_SAMPLES, each with whole groups. Only a group that is longer than a page is divided."""
    pages, first, last = [], 0, 0
    for end in [*starts[1:], rows]:
        if end - first > MAX_SAMPLES and last > first:
            pages.append(range(first, last))
            first = last
        while end - first > MAX_SAMPLES:
            pages.append(range(first, first + MAX_SAMPLES))
            first += MAX_SAMPLES
        last = end
    return [*pages, range(first, rows)]


def _short_samples(table: pa.Table, first_row: int) -> list[dict[str, Any]]:
    columns = {
        name: table.column(name).to_pylist() for name in table.column_names if name not in ("prompt", "response", "reward_model")
    }
    responses = table.column("response").to_pylist()
    samples = []
    for i, response in enumerate(responses):
        parts = {name.removeprefix("part/"): finite(values[i]) for name, values in columns.items() if name.startswith("part/")}
        failures = {name.removeprefix("failure/"): values[i] for name, values in columns.items() if name.startswith("failure/")}
        sample = {
            "row": first_row + i,
            "prompt_id": columns["prompt_id"][i],
            "index": columns["index"][i],
            "data_source": columns["data_source"][i],
            "reward": finite(columns["reward"][i]),
            "tokens": columns["tokens"][i],
            "characters": len(response or ""),
            "status": columns["status"][i],
            "malformed": columns["malformed"][i],
            "failure": columns["failure"][i],
            "advantage": finite(columns["advantage"][i]) if "advantage" in columns else None,
            "parts": {name: value for name, value in parts.items() if value is not None},
            "failures": {name: text for name, text in failures.items() if text},
            "text": _short(response or ""),
        }
        samples.append({name: value for name, value in sample.items() if value is not None and value != {}})
    return samples


def _group_of(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [s["reward"] for s in members if "reward" in s]
    lengths = [s.get("tokens", s["characters"]) for s in members]
    names = dict.fromkeys(name for s in members for name in s.get("parts", {}))
    means = {n: statistics.fmean(s["parts"][n] for s in members if n in s.get("parts", {})) for n in names}
    return {
        "id": members[0].get("prompt_id"),
        "data_source": members[0].get("data_source"),
        "rows": len(members),
        "mean": statistics.fmean(rewards) if rewards else None,
        "std": statistics.pstdev(rewards) if rewards else None,
        "signal": len(set(rewards)) > 1 if len(members) > 1 else None,
        "length": statistics.fmean(lengths),
        "parts": means,
    }


def read_sample(source: Source, split: str, step: int, row: int) -> dict[str, Any]:
    """A sample with all that was recorded of it."""
    table = source.read(split, step, rows=range(row, row + 1)) if row >= 0 else None
    if table is None or not table.num_rows:
        raise NotThere(f"step {step} ({split}) has no sample number {row}")
    return _sample(table.to_pylist()[0], split, step, row)


def read_all_samples(source: Source, split: str, step: int, most: int) -> list[dict[str, Any]]:
    """The same of the first `most` samples of a step."""
    rows = source.read(split, step, lambda name: not name.startswith("token/"), range(most)).to_pylist()
    return [_sample(values, split, step, row) for row, values in enumerate(rows)]


def _sample(values: Mapping[str, Any], split: str, step: int, row: int) -> dict[str, Any]:
    names = dict.fromkeys(name.partition("/")[2] for name in values if name.startswith(("view/", "failure/", "trace/")))
    parts = {name.removeprefix("part/"): finite(x) for name, x in values.items() if name.startswith("part/") and x is not None}
    tokens = {name.removeprefix("token/"): x for name, x in values.items() if name.startswith("token/") and x is not None}
    return {
        "split": split,
        "step": step,
        "row": row,
        "prompt_id": values.get("prompt_id"),
        "index": values.get("index"),
        "data_source": values.get("data_source"),
        "prompt": [{"role": m["role"], "content": _long(m["content"])} for m in values.get("prompt") or ()],
        "tools": _long(values.get("tools")),
        "response": _long(values.get("response")),
        "ground_truth": _long((values.get("reward_model") or {}).get("ground_truth")),
        "extra_info": _long(values.get("extra_info")),
        "reward": finite(values.get("reward")),
        "advantage": finite(values.get("advantage")),
        "status": values.get("status"),
        "tokens": values.get("tokens"),
        "mean_logprob": finite(values.get("mean_logprob")),
        "version": values.get("version"),
        "malformed": values.get("malformed"),
        "failure": values.get("failure"),
        "parts": parts,
        "rewards": {
            name: {
                "view": _long(values.get(f"view/{name}")),
                "failure": values.get(f"failure/{name}"),
                "trace": _trace(values.get(f"trace/{name}")),
            }
            for name in names
        },
        "token_names": list(tokens),
    }


def read_tokens(source: Source, split: str, step: int, row: int) -> dict[str, Any]:
    """Token by token, where the run has kept them: text, log-prob, advantage and what else there is."""
    table = source.read(split, step, lambda name: name.startswith("token/"), rows=range(row, row + 1))
    values = table.to_pylist()[0] if table.num_rows else {}
    found = {name.removeprefix("token/"): x for name, x in values.items() if x is not None}
    return {name: [finite(v) if isinstance(v, float) else v for v in x] for name, x in found.items()}


def _trace(text: str | None) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        trace = json.loads(text, parse_constant=str)  # NaN and Infinity are written to parquet, but no browser reads them
    except (ValueError, RecursionError):
        return {"trace": text}
    return trace if isinstance(trace, dict) else {"trace": trace}


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _last_message(messages: Sequence[Mapping[str, Any]] | None) -> str:
    return (messages[-1]["content"] or "") if messages else ""


def _short(text: str) -> str:
    """The beginning and the end, where an answer usually is. Redacted before it is cut: half a key does not look like one."""
    if len(text) <= SHORT:
        return text
    text = redact(text) if len(text) < 1 << 16 else text
    return f"{text[: SHORT * 2 // 3]} … {text[-SHORT // 3 :]}"


def _long(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n… ({len(text) - MAX_TEXT:,} more characters)"
