"""Which stage a file is for, and the rules of its system."""

from collections.abc import Callable

from plaudit.convert.conversion import Conversion
from plaudit.convert.huggingface import convert_llamafactory, convert_trl
from plaudit.convert.openrlhf import convert_openrlhf
from plaudit.convert.reading import VLLM, Source
from plaudit.convert.verl import convert_verl, fork_of
from plaudit.convert.verl_rewards import served_model
from plaudit.errors import PlauditError
from plaudit.other_systems import llamafactory, openrlhf, trl, verl
from plaudit.other_systems.entries import Table

TRL_CLASSES = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "dpo": "DPOConfig", "sft": "SFTConfig", "reward": "RewardConfig"}
TRL_STAGES = {"GRPOConfig": "rl", "RLOOConfig": "rl", "DPOConfig": "dpo", "SFTConfig": "sft", "RewardConfig": "reward-model"}
LLAMAFACTORY_STAGES = {"sft": "sft", "dpo": "dpo", "rm": "reward-model"}
OPENRLHF_STAGES = {"ppo": "rl", "sft": "sft", "dpo": "dpo", "rm": "reward-model"}


def _verl(source: Source, defaults: str) -> Conversion:
    if "sft" in source.program:
        raise PlauditError(
            f"{source.path}: {source.program} is verl's SFT trainer, which plaudit convert does not read. Write an sft "
            f"recipe: `plaudit "
            "recipes` lists some to start from."
        )
    fork = fork_of(source.settings) if defaults == "auto" else defaults
    conversion = Conversion(source, verl.TABLE, "rl", verl.FORKS[fork], fork)
    convert_verl(conversion)
    return conversion


def _llamafactory(source: Source, defaults: str) -> Conversion:
    stage = str(source.settings.get("stage") or "sft")
    if stage not in LLAMAFACTORY_STAGES:
        raise PlauditError(
            f"{source.path}: LLaMA-Factory's stage {stage} has no counterpart that could be converted. For RL write an rl "
            f"recipe (docs/rl.md)."
        )
    conversion = Conversion(source, llamafactory.TABLE, LLAMAFACTORY_STAGES[stage])
    convert_llamafactory(conversion)
    return conversion


def _trl(source: Source, defaults: str) -> Conversion:
    config = _trl_class(source)
    conversion = Conversion(source, trl.TABLE, TRL_STAGES[config], trl.CLASS_DEFAULTS[config], config)
    convert_trl(conversion)
    return conversion


def _trl_class(source: Source) -> str:
    """By the program (`trl dpo`, dpo.py, DPOTrainer), else by arguments that only one config has."""
    program, settings = source.program.lower(), source.settings
    named = next((config for name, config in TRL_CLASSES.items() if name in program), None)
    if named is not None:
        return named
    if settings.keys() & {"num_generations", "max_completion_length", "reward_funcs"}:
        return "GRPOConfig"
    if "center_rewards_coefficient" in settings:
        return "RewardConfig"
    return "DPOConfig" if "beta" in settings else "SFTConfig"


def _openrlhf(source: Source, defaults: str) -> Conversion:
    named = next((stage for name, stage in OPENRLHF_STAGES.items() if f"train_{name}" in source.program), None)
    table = openrlhf.TABLE
    keys = {table.canonical(key) for key in source.settings}
    if named is None:
        has_prompts = any(key.startswith(("rollout.", "algo.", "vllm.")) or key == "data.prompt_dataset" for key in keys)
        named = (
            "rl"
            if has_prompts
            else "dpo"
            if keys & {"model.beta", "model.ipo_enable"}
            else "reward-model"
            if "data.chosen_key" in keys
            else "sft"
        )
    conversion = Conversion(source, table, named, openrlhf.STAGE_DEFAULTS[named])
    convert_openrlhf(conversion)
    return conversion


def _vllm(source: Source, defaults: str) -> Conversion:
    conversion = Conversion(source, Table(VLLM, {}, {}), "score")
    conversion.no_meaning("the server listens on this machine only", "host")
    conversion.reward({"kind": "judge", "model": served_model(source.settings)}, *conversion.given)
    conversion.remark("rewards.0: choose the judge's parser and template (docs/reward_models/judge.md)")
    return conversion


CONVERTERS: dict[str, Callable[[Source, str], Conversion]] = {
    "verl": _verl, "llamafactory": _llamafactory, "trl": _trl, "openrlhf": _openrlhf, VLLM: _vllm,
}  # fmt: skip
"""By system: its settings and, for verl, whose defaults they rely on."""
