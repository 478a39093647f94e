"""Lines, tables and a plot of gpu_rollout.py's results."""

import statistics
from pathlib import Path

from rollout_work import Work, floor_tokens_per_s

NAMES = {"native": "plaudit native", "vllm": "vLLM"}
REQUIRED = {  # tokens/s of native to vLLM
    ("0.5B", 0): 3.0, ("0.5B", 1): 4.0, ("1.5B", 0): 2.0, ("1.5B", 1): 2.5, ("7B", 0): 1.3, ("7B", 1): 1.3,
}  # fmt: skip
REQUIRED_MIX, REQUIRED_MISMATCH, REQUIRED_STEADY = 1.5, 0.004, 2.0
CYCLE_ROWS = {  # what is compared between the first five cycles and the last five: column → its unit
    "sample_s": "s", "update_s": "s", "sampled allocated": "GB", "sampled reserved": "GB", "sampled driver": "GB",
    "trained allocated": "GB", "trained reserved": "GB", "trained driver": "GB", "sampling peak": "GB", "trained peak": "GB",
}  # fmt: skip
MEMORIES = {"driver": "as reported by the driver", "reserved": "reserved by torch", "allocated": "live tensors"}
Entries = dict[str, dict]


def line_of(entry: dict) -> str:
    """One entry as a line of progress output."""
    name = " ".join(part for part in (entry["section"], NAMES[entry["engine"]], entry["model"], entry["case"]) if part)
    match entry["section"]:
        case "grid" | "mix":
            start = f"; {entry['start_s']:.0f} s to start" if "start_s" in entry else ""
            tried = "".join(f"; {way}: {', '.join(f'{r:,.0f}' for r in rates)}" for way, rates in entry.get("tried", {}).items())
            found = f"{rate_of(entry)} tokens/s{start}{tried}"
        case "sweep":
            found = f"{entry['rate']:,.0f} tokens/s" if entry["rate"] else f"does not fit ({entry['settings']['cache_gb']:.0f} GB)"
        case "mismatch":
            found = f"mean {entry['mean']:.2g}, largest {entry['largest']:.2g}, entropy {entry['entropy']:.2f}"
            if "from_fp32" in entry:
                found += f"; from fp32 {entry['from_fp32']:.5f}, the trainer {entry['trainer_from_fp32']:.5f}"
        case "cycles" | "step":
            sample_s, update_s = (entry["columns"][name][-1] for name in ("sample_s", "update_s"))
            found = f"{entry['cycles']} cycles, the last with {sample_s:.2f} s of sampling and {update_s:.2f} s of training"
        case "start":
            found = f"{entry['first_token_s']:.1f} s to the first token, {entry['whole_s']:.1f} s in all"
        case "check":
            return f"{'pass' if entry['passed'] else 'FAIL'}  {entry['case']}: {entry['found']} ({entry['seconds']:.1f} s)"
        case "bandwidth":
            found = f"{entry['bytes_per_s'] / 1e12:.2f} TB/s read and written, copying {entry['bytes'] / 1e9:.1f} GB"
        case _:
            found = "made"
    return f"{name}: {found}  [{entry['about']}]"


def rate_of(entry: dict | None) -> str:
    """Median and range."""
    if entry is None:
        return "not measured"
    rates = entry["rates"]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}…{max(rates):,.0f})"


def ratio_of(native: dict | None, vllm: dict | None) -> str:
    return f"{statistics.median(native['rates']) / statistics.median(vllm['rates']):.2f}×" if native and vllm else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def tables(entries: Entries, work: Work) -> str:
    parts = ["\n(--tiny: these numbers mean nothing)"] if work.tiny else []
    for part in (grid, mix, sweep, mismatch, cycles, step, start, check):
        if any(entry["section"] == part.__name__ for entry in entries.values()):
            parts.append(f"\n## {part.__name__}\n{part(entries, work)}\n{about(entries, part.__name__)}")
    failures = [f"{key.removeprefix('failed/')}: {e['cause']}" for key, e in entries.items() if e["section"] == "failed"]
    if failures:
        parts.append("\nCould not be measured, when last tried:\n" + "\n".join(failures))
    return "\n".join(parts)


def about(entries: Entries, section: str) -> str:
    """Machines and versions that the numbers of a section come from, and the settings of the baseline."""
    chosen = [entry for entry in entries.values() if entry["section"] == section]
    lines = list(dict.fromkeys(entry["about"] for entry in chosen))
    for entry in chosen:
        if entry["engine"] == "vllm" and "settings" in entry:
            name = f"vLLM {entry['model']} {entry['case']}".strip()
            tried = ", ".join(f"{way} {max(rates):,.0f}" for way, rates in entry.get("tried", {}).items())
            lines.append(f"{name}: {entry['start_s']:.0f} s to start{f'; best of {tried}' if tried else ''}")
    settings = [entry["settings"] for entry in chosen if entry["engine"] == "vllm" and "settings" in entry]
    lines += dict.fromkeys("vLLM's settings: " + ", ".join(f"{name}={value}" for name, value in one.items()) for one in settings)
    return "\n" + "\n".join(lines)


def grid(entries: Entries, work: Work) -> str:
    copy, rows = entries.get("bandwidth/native/copy"), []
    for model, counts in work.grid.items():
        for index, sequences in enumerate(counts):
            native, vllm = (entries.get(f"grid/{engine}/{model}/{sequences}") for engine in ("native", "vllm"))
            if native is None and vllm is None:
                continue
            floor = floor_tokens_per_s(model, work, sequences, copy["bytes_per_s"]) if copy else None
            share = f"{statistics.median(native['rates']) / floor:.0%}" if native and floor else ""
            rows.append([
                model, str(sequences), rate_of(native), rate_of(vllm), ratio_of(native, vllm), f"{REQUIRED[model, index]:g}×",
                f"{floor:,.0f}" if floor else "", share, f"{native['first_run_s']:.1f}" if native else "",
            ])  # fmt: skip
    head = ["model", "sequences", "native tokens/s", "vLLM tokens/s", "ratio", "required", "floor", "native's share", "first run s"]
    if copy is None:
        return table(head, rows)
    speed = f"{copy['bytes_per_s'] / 1e12:.2f} TB/s"
    return f"{table(head, rows)}\n\nFloor: decoding at {speed}, read + written (a copy of {copy['bytes'] / 1e9:.1f} GB)."


def mix(entries: Entries, work: Work) -> str:
    rows = []
    for model in work.mix_models:
        native, vllm = (entries.get(f"mix/{engine}/{model}") for engine in ("native", "vllm"))
        if native or vllm:
            made = [f"{statistics.mean(entry['tokens']):,.0f}" if entry else "" for entry in (native, vllm)]
            rows.append([model, rate_of(native), rate_of(vllm), ratio_of(native, vllm), f"{REQUIRED_MIX:g}×", *made])
    return table(["model", "native tokens/s", "vLLM tokens/s", "ratio", "required", "native's tokens per run", "vLLM's"], rows)


def sweep(entries: Entries, work: Work) -> str:
    rows = []
    for sequences in work.sweep_sequences:
        row = [str(sequences)]
        for length in work.sweep_lengths:
            entry = entries.get(f"sweep/native/0.5B/{sequences}x{length}")
            row.append("" if entry is None else f"{entry['rate']:,.0f}" if entry["rate"] else "does not fit")
        rows.append(row)
    return table(["sequences ╲ length", *map(str, work.sweep_lengths)], rows) + "\n\nTokens/s of decoding alone, 0.5B."


def mismatch(entries: Entries, work: Work) -> str:
    rows = []
    for entry in (entry for entry in entries.values() if entry["section"] == "mismatch"):
        numbers = [f"{entry['mean']:.2g}", f"{entry['largest']:.2g}", f"{entry['bias']:+.2g}", f"{entry['entropy']:.2f}"]
        also = ("from_transformers", "from_fp32", "trainer_from_fp32")
        numbers += [f"{entry[name]:.5f}" if name in entry else "" for name in also]
        held = "≤" if entry["mean"] <= REQUIRED_MISMATCH else ">"
        required = f"{held} {REQUIRED_MISMATCH:g}" if entry["engine"] == "native" else ""
        case = entry["case"] if entry.get("same_weights", True) else f"{entry['case']}, weights other than native's"
        rows.append([NAMES[entry["engine"]], entry["model"], case, *numbers, f"{entry['tokens']:,}", required])
    head = ["engine", "model", "", "mean abs. difference", "largest", "mean difference", "entropy, nats"]
    head += ["from plain transformers", "sampler from fp32", "trainer from fp32", "tokens", "required"]
    note = (
        "Differences are between the sampler's and the trainer's log-probs; 'from …' is the mean abs. difference from unmodified "
        "transformers in bf16, and from the same weights in fp32."
    )
    return f"{table(head, rows)}\n\n{note}"


def step(entries: Entries, work: Work) -> str:
    rows = []
    for entry in (entry for entry in entries.values() if entry["section"] == "step"):
        columns = entry["columns"]
        steps = [a + b for a, b in zip(columns["sample_s"], columns["update_s"], strict=True)]
        medians = [f"{statistics.median(columns[name]):.3f}" for name in ("sample_s", "update_s")]
        spread = f"{statistics.median(steps):.3f} ({min(steps):.3f}…{max(steps):.3f})"
        rows.append([entry["model"], *medians, spread, f"{statistics.median(columns['mismatch']):.1e}"])
    return table(["model", "sampling s", "update s", "step s", "mismatch"], rows) if rows else ""


def cycles(entries: Entries, work: Work) -> str:
    parts = []
    for entry in (entry for entry in entries.values() if entry["section"] == "cycles"):
        columns, rows = dict(entry["columns"]), []
        columns["cycle_s"] = [a + b for a, b in zip(columns["sample_s"], columns["update_s"], strict=True)]
        for name, unit in {"cycle_s": "s", **CYCLE_ROWS}.items():
            first, last = statistics.mean(columns[name][:5]), statistics.mean(columns[name][-5:])
            change = 100 * (last - first) / first
            within = "yes" if change <= REQUIRED_STEADY else "no"  # faster or smaller is fine
            middle, spread = columns[name][5:-5], ""
            if unit == "s" and middle:
                lowest, highest = min(middle), max(middle)
                spread = f"{highest - lowest:.3f} s ({100 * (highest - lowest) / statistics.mean(middle):.1f} %)"
            label = {"cycle_s": "sampling + update", "sample_s": "sampling", "update_s": "update"}.get(name, name)
            rows.append([label, f"{first:.3f} {unit}", f"{last:.3f} {unit}", f"{change:+.2f} %", within, spread])
        head = ["", "first five", "last five", "change", f"at most {REQUIRED_STEADY:g} % more"]
        parts.append(table([*head, f"highest − lowest of the {max(0, entry['cycles'] - 10)} between"], rows))
        means = {name: statistics.mean(values) for name, values in columns.items()}
        phases = {"sampling": "at the first sample", "sampled": "after sampling", "trained": "after an update"}
        used = [[f"GB in use, {what}", *(f"{means[f'{phase} {of}']:.2f}" for phase in phases)] for of, what in MEMORIES.items()]
        returned = means["sampling driver"] - means["sampled driver"]
        parts.append("\n" + table(["", *phases.values()], used))
        parts.append(
            f"\n{entry['model']}, {entry['cycles']} cycles. Sampling gives {returned:.1f} GB back to the device, which had "
            f"{entry['bare']['driver']:.1f} GB in use before the model was loaded."
        )
    return "\n".join(parts)


def start(entries: Entries, work: Work) -> str:
    rows = []
    for engine, name in NAMES.items():
        found = [entries.get(f"start/{engine}/0.5B/{case}") for case in ("cold", "warm")]
        if any(found):
            rows.append([name, *(f"{e['first_token_s']:.1f} s ({e['whole_s']:.1f} s)" if e else "not measured" for e in found)])
    return table(["", "cold: to the first token (whole command)", "warm"], rows)


def check(entries: Entries, work: Work) -> str:
    found = [entry for entry in entries.values() if entry["section"] == "check"]
    failed = [f"FAILED: {entry['case']}: {entry['found']}" for entry in found if not entry["passed"]]
    return "\n".join([f"{len(found) - len(failed)} of {len(found)} checks passed.", *failed])


def draw(entries: Entries, work: Work, file: Path) -> Path | None:
    """Decoding speed by batch and length."""
    found = [entry for entry in entries.values() if entry["section"] == "sweep"]
    if not any(entry["rate"] for entry in found):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.2))
    colours = [plt.get_cmap("viridis")(0.9 * i / max(1, len(work.sweep_lengths) - 1)) for i in range(len(work.sweep_lengths))]
    unfit = False
    for length, colour in zip(work.sweep_lengths, colours, strict=True):
        of_length = {e["settings"]["sequences"]: e["rate"] for e in found if e["settings"]["length"] == length}
        measured = {sequences: rate for sequences, rate in sorted(of_length.items()) if rate}
        if not measured:
            continue
        axes.plot(list(measured), list(measured.values()), "o-", color=colour, markersize=4, label=f"{length:,} tokens")
        for sequences in (sequences for sequences, rate in of_length.items() if not rate):
            label = None if unfit else f"does not fit ({work.sweep_bytes / 1e9:,.0f} GB of keys and values)"
            unfit = True
            axes.plot([sequences], [measured[max(measured)]], "x", color=colour, markersize=8, markeredgewidth=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(work.sweep_sequences, [f"{n:,}" for n in work.sweep_sequences])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [digit * 10**power for power in range(1, 8) for digit in (1, 2, 5) if low <= digit * 10**power <= high]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("concurrent sequences")
    axes.set_ylabel("tokens/s, decoding only")
    title = "plaudit's native engine, Qwen2.5-0.5B shape, bf16"
    axes.set_title(f"{title} (--tiny: means nothing)" if work.tiny else title, fontsize=11)
    figure.text(0.99, 0.01, found[-1]["about"], ha="right", fontsize=6, color="grey")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="length of a sequence", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(file, dpi=150)
    return file
