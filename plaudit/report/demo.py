"""The demo's figure: SFT loss, and reward during RL."""

from collections.abc import Sequence
from pathlib import Path


def draw_demo(
    sft: Sequence[dict[str, float]], rl: Sequence[dict[str, float]], rewards: dict[str, float], path: Path
) -> None:  # fmt: skip
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.8])
    left.plot([row["step"] for row in sft if "loss" in row], [row["loss"] for row in sft if "loss" in row], color="tab:gray")
    left.set(title="SFT on careless demonstrations", xlabel="step", ylabel="loss per token")
    sampled = [(row["step"], row["reward"]) for row in rl if "reward" in row]
    validated = [(row["step"], row["val/reward"]) for row in rl if "val/reward" in row]
    right.plot(*zip(*sampled, strict=True), color="tab:blue", alpha=0.3, linewidth=1, label="training prompts")
    right.plot(*zip(*validated, strict=True), color="tab:blue", marker="o", markersize=4, label="validation prompts")
    for name, colour in (("base", "tab:red"), ("after SFT", "tab:gray")):
        right.axhline(rewards[name], color=colour, linestyle="--", linewidth=1, label=f"{name}: {rewards[name]:.2f}")
    right.set(title=f"GRPO: {rewards['after SFT']:.2f} → {rewards['after RL']:.2f}", xlabel="step", ylabel="share of right answers")
    right.set_ylim(-0.03, 1.03)
    right.legend(fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
