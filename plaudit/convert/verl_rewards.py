"""verl's rewards, and those of its forks: functions, reward models, judges, several of them, and verl's own rules."""

from typing import Any

from plaudit.convert.conversion import Conversion
from plaudit.other_systems.verl import MODEL
from plaudit.recipe.rewards import OF_MODEL
from plaudit.response_files import LONGCOT

RM = "reward_model"
FUNCTION, FUNCTION_NAME = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
MANAGERS = (f"{RM}.reward_manager", "reward.reward_manager.name", "reward.reward_manager.source", "reward.reward_manager")
RANKING_FUNCTIONS = {
    "ranking_score_reward_fn": "ranking_score",
    "ranking_reward_fn": "ranking",
    "zero_reward_fn": "zero",
    "no_cot_reward_fn": "no_analysis",
}
"""GRRM's reward functions and the formats of the rule that does the same."""
EXTRACTORS = {"line": "line", "codeblock": "codeblock", "oneline": "oneline", "none": "none"}
TINYV_MODES = {"tinyv_only": "only", "addon": "addon", "mixed": "mixed"}
JUDGED = ["*_tinyv*", "*HardVerify-Math*"]
"""Data sources that TinyV sends to its verifier."""
RMS_PLUGINS = "verl/workers/reward_function"
RMS_ANSWER_TOKENS = 4096


def convert_rewards(c: Conversion) -> None:
    if c.has(f"{RM}.tinyv_setup"):
        _verifier(c)
    elif c.has(f"{RM}.reward_function"):
        _several_models(c)
    elif c.is_on(f"{RM}.enable") and (
        c.has(f"{RM}.custom_processor.name") or str(c.value(f"{RM}.strategy")).lower() in ("genrm", "vheadrm")
    ):
        _processor(c)
    elif c.is_on(f"{RM}.enable") and c.value(f"{RM}.model.path"):
        _sequence_model(c)
    elif c.is_on("reward.reward_model.enable") and not c.value(FUNCTION):
        c.reward({"kind": "scalar_model", "model": {"path": c.value("reward.reward_model.model_path") or "${REWARD_MODEL}",
            "placement": "offload"}},
                 "reward.reward_model.model_path", "reward.reward_model.enable")  # fmt: skip
        c.remark("rewards.0: verl's reward.reward_model may also be a judge; then use kind: judge (docs/reward_models/README.md)")
    elif c.value(FUNCTION):
        _function(c)
    else:
        _own_rules(c)
    if c.is_on(f"{RM}.enable") and not c.value(f"{RM}.model.path"):
        c.needs(
            "the reward model's path is not given: add {kind: scalar_model, model: {path: …}} to rewards if you have one",
            f"{RM}.enable",
        )
    _overlong(c, f"{RM}.reward_kwargs.overlong_buffer_cfg", f"{RM}.reward_kwargs.max_resp_len", capped=False)
    _overlong(c, f"{RM}.overlong_buffer", "data.max_response_length", capped=False)
    _others(c)


def _others(c: Conversion) -> None:
    """Keys around rewards that are decided now."""
    c.no_meaning("rewards are scored concurrently, while sampling continues: there are no managers", *MANAGERS)
    c.no_meaning("no function is given", FUNCTION, FUNCTION_NAME)
    c.no_meaning("no sandbox is given", *([] if c.value("reward.sandbox_fusion.url") else ["reward.sandbox_fusion.url"]))
    off = not c.is_on(f"{RM}.enable") and not c.has(f"{RM}.tinyv_setup", f"{RM}.reward_function")
    for key in list(c.given):
        if key.startswith((f"{RM}.", "reward.reward_model.")) and (entry := c.table.find(key)) and entry.way == "composed":
            if off or c.given[key] in (None, False):
                c.no_meaning("it is off" if off else "it is off, as here", key)
            elif key.startswith(f"{RM}.custom_processor.overlong_buffer"):
                c.no_meaning("the overlong penalty is off", key)
    for key in list(c.given):
        if key.startswith("reward.custom_reward_function.reward_kwargs."):
            c.needs("add it to `arguments` of the function in rewards", key)
    c.no_meaning("a conversation too long for the reward model is malformed, not cut", f"{RM}.max_length")
    c.no_meaning("weights of a reward model are offloaded or resident: model.placement of the reward", f"{RM}.strategy",
                 f"{RM}.model.fsdp_config.param_offload", f"{RM}.enable", f"{RM}.rollout.free_cache_engine")  # fmt: skip


def _function(c: Conversion) -> None:
    path, name = c.value(FUNCTION), c.value(FUNCTION_NAME) or "compute_score"
    if name in RANKING_FUNCTIONS:
        reward: dict[str, Any] = {"kind": "ranking"}
        if RANKING_FUNCTIONS[name] != "ranking_score":
            reward["format"] = RANKING_FUNCTIONS[name]
        c.reward(reward, FUNCTION, FUNCTION_NAME)
        return
    reward = {"kind": "function", "path": path}
    if name != "compute_score":
        reward["function"] = name
    c.reward(reward, FUNCTION, FUNCTION_NAME)


def _own_rules(c: Conversion) -> None:
    """verl's default_compute_score chooses by data_source, in code."""
    c.reward({"kind": "gsm8k", "when": {"data_source": "openai/gsm8k"}})
    c.reward({"kind": "math", "when": "otherwise"})
    c.remark(
        "rewards: verl chooses a rule by data_source in its code; the recipe has gsm8k for openai/gsm8k and math for all "
        "else. Change `when` if your rows need others (docs/rewards.md)"
    )


def _overlong(c: Conversion, section: str, limit: str, *, capped: bool, gate: dict[str, Any] | None = None) -> None:
    keys = [f"{section}.{name}" for name in ("enable", "len", "penalty_factor")]
    if c.is_on(f"{section}.enable"):
        tokens = c.value(limit) or c.value("data.max_response_length")
        reward = {"kind": "overlong", "max_tokens": tokens, "buffer_tokens": c.value(f"{section}.len")}
        if (penalty := c.value(f"{section}.penalty_factor")) not in (None, 1, 1.0):
            reward["penalty"] = penalty
        reward |= {} if gate is None else {"gate": gate}
        c.reward(reward if capped else reward | {"capped": False}, *keys, *([limit] if limit.startswith(RM) else []))
    c.no_meaning("the overlong penalty is off", *keys, *([limit] if limit.startswith(RM) else []))


def _processor(c: Conversion) -> None:
    """DoubleVII/verl, branch gen_rm: a generative reward model that compares a group, scores one response, or has a value head."""
    model: dict[str, Any] = {"path": c.value(f"{RM}.model.path") or "${REWARD_MODEL}", "placement": "offload"}
    processor, strategy = str(c.value(f"{RM}.custom_processor.name")), str(c.value(f"{RM}.strategy")).lower()
    if c.value(f"{RM}.prompt_length"):
        model["max_prompt_tokens"] = c.value(f"{RM}.prompt_length")
    extract = EXTRACTORS.get(str(c.value(f"{RM}.custom_processor.extractor_type")), "none")
    view = {} if extract == "none" else {"view": {"extract": extract}}
    described = "enable strategy model.path prompt_length default_reward rollout.free_cache_engine score_scale_factor"
    described += " custom_processor.extractor_type custom_processor.name custom_processor.path"
    keys = [f"{RM}.{name}" for name in described.split()]
    values = {"scale": c.value(f"{RM}.score_scale_factor"), "malformed": c.value(f"{RM}.default_reward")}
    values = {name: value for name, value in values.items() if value is not None}
    if strategy == "vheadrm":
        c.reward({"kind": "scalar_model", "model": model, **view, **values}, *keys)
    else:
        kind = "group_judge" if "Group" in processor or c.is_on(f"{RM}.keep_group") else "judge"
        sampling = {
            "max_new_tokens": c.value(f"{RM}.rollout.response_length") or 1024,
            "temperature": c.value(f"{RM}.rollout.temperature") or 0,
        }
        if (top_p := c.value(f"{RM}.rollout.top_p")) not in (None, 1, 1.0):
            sampling["top_p"] = top_p
        c.reward({"kind": kind, "model": model, "sampling": sampling, **view, **values}, *keys,
                 *(f"{RM}.{name}" for name in ("rollout.temperature", "rollout.response_length", "keep_group")))  # fmt: skip
        c.no_meaning("the judge samples from all tokens, as here", f"{RM}.rollout.top_p", f"{RM}.rollout.top_k")
        c.remark(
            f"rewards.0.template: a published judge needs the prompt that it was trained with; write it into a .jinja "
            f"file (docs/reward_models/{kind}.md)"
        )
    answer = c.value(f"{RM}.custom_processor.group_prompt_type")
    if answer in ("score", "ranking"):
        c.rewards[-1]["answer"] = answer
    c.no_meaning("what the judge's answer ends with: `answer` of the reward", f"{RM}.custom_processor.group_prompt_type")
    c.needs("put the example into the judge's template", f"{RM}.custom_processor.group_add_example")
    section, judged = f"{RM}.custom_processor.overlong_buffer", c.rewards[-1]
    # The default reward of a response that was not compared is complete: no penalty is added to it.
    default = judged.get("malformed") if judged["kind"] == "group_judge" else None
    gate = None if default is None else {"reward": "group_judge", "above": default}
    _overlong(c, section, f"{section}.max_resp_len", capped=True, gate=gate)
    if c.value(FUNCTION):
        c.no_meaning("verl needs a function beside its reward model, which returns 0", FUNCTION, FUNCTION_NAME)


def _sequence_model(c: Conversion) -> None:
    """A sequence classifier, which alone gives the rewards (RLMT; verl's own reward model worker)."""
    reward: dict[str, Any] = {"kind": "scalar_model", "model": {"path": c.value(f"{RM}.model.path"), "placement": "offload"}}
    config = c.value(f"{RM}.longcot_config")
    if config == f"{c.value(f'{MODEL}.path')}/{LONGCOT}":
        config = OF_MODEL
    if config:
        reward["view"] = {"longcot_config": config, **({"strict": True} if c.is_on(f"{RM}.strict") else {})}
    if c.is_on(f"{RM}.model.trust_remote_code"):
        reward["model"]["trust_remote_code"] = True
    tokenizer = c.value(f"{RM}.model.input_tokenizer")
    if tokenizer not in (None, c.value(f"{MODEL}.path")):
        c.needs(
            "a reward model always reads text with its own tokenizer and template; check that it has them",
            f"{RM}.model.input_tokenizer",
        )
    c.no_meaning("a reward model reads the response as text, with its own tokenizer", f"{RM}.model.input_tokenizer")
    keys = [f"{RM}.{name}" for name in ("enable", "model.path", "model.model_type", "longcot_config")]
    c.reward(reward, *(key for key in keys if c.value(key) is not None))
    if config:
        c.reward_keys([0], f"{RM}.strict")
    c.no_meaning("there are no thoughts to strip: longcot_config is null", f"{RM}.strict", f"{RM}.longcot_config")
    if c.value(FUNCTION):
        c.needs(
            "verl's naive manager returns the reward model's score and ignores the function: add it to rewards if you want both",
            FUNCTION,
            FUNCTION_NAME,
        )


def _several_models(c: Conversion) -> None:
    """VeRL-with-rms: plugin files around generating models, combined one after the other with a rule."""
    names = [str(name) for name in _listed(c.value(f"{RM}.reward_function"))]
    paths = _listed(c.value(f"{RM}.model.path"))
    temperatures, weights = _listed(c.value(f"{RM}.reward_vllm_rollout.temperature")), _listed(c.value(f"{RM}.reward_weight"))
    combines = _listed(c.value(f"{RM}.reward_combine_func"))
    c.reward({"kind": "function", "name": "rule", "path": "rule.py"}, f"{RM}.combine_reward")
    c.remark(
        "rewards.0 (rule): VeRL-with-rms always computes its rule first (verl/utils/reward_score); put yours into rule.py "
        "as compute_score"
    )
    described = "reward_function model.path reward_weight reward_combine_func enable reward_model_type"
    keys = [f"{RM}.{name}" for name in (*described.split(), "reward_vllm_rollout.temperature")]
    for i, name in enumerate(names):
        reward = {
            "kind": "plugin", "name": name if names.count(name) == 1 else f"{name}_{i}", "path": f"{RMS_PLUGINS}/{name}.py",
            "model": {"path": _at(paths, i, "${REWARD_MODEL}"), "placement": "offload"},
            "prompt_column": f"rm_prompt_{i}",
            "sampling": {"max_new_tokens": RMS_ANSWER_TOKENS, "temperature": _at(temperatures, i, 0.0)},
            "weight": _at(weights, i, 1.0), "combine": {"mul": "multiply"}.get(_at(combines, i, "add"), _at(combines, i, "add")),
            "gate": {"reward": "rule", "above": 0.999},
        }  # fmt: skip
        c.reward({key: value for key, value in reward.items() if (key, value) not in (("weight", 1.0), ("combine", "add"))})
    c.reward_keys(range(1, len(c.rewards)), *keys)
    c.remark(
        "rewards: as in VeRL-with-rms, reward models count only where the rule gives 1 (gate); each reads its own column "
        "of the rows (prompt_column: rm_prompt_0, rm_prompt_1, …; docs/reward_models/plugin.md)"
    )
    if "mul" in combines:
        c.remark(
            "rewards: VeRL-with-rms multiplies by 0 where the rule is not 1; here the gate leaves such rows at the rule's value"
        )
    tokenizer = f"{RM}.model.input_tokenizer"
    c.no_meaning("plugins get the response as text, and the reward model's own tokenizer", tokenizer)
    if c.value(f"{RM}.use_bge") is not False:
        weight = c.value(f"{RM}.bge_weight") or 0.5
        similarity = f"{{kind: similarity, path: BAAI/bge-large-zh-v1.5, weight: {weight}}}"
        text = f"add {similarity} to rewards; its scale differs from the BGE service's"
        c.needs(text, f"{RM}.use_bge", f"{RM}.bge_weight")
        if not c.has(f"{RM}.use_bge"):
            c.remark(f"rewards: VeRL-with-rms adds a BGE similarity by default (use_bge): {text}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _at(values: list[Any], i: int, default: Any) -> Any:
    return values[i] if i < len(values) else default


def _verifier(c: Conversion) -> None:
    """TinyV and rrm-cure-miracle-steps: a rule and a judge on a server, by data source."""
    setup, weight = c.value(f"{RM}.tinyv_setup"), c.value(f"{RM}.tinyv_weight")
    keys = (f"{RM}.tinyv_setup", f"{RM}.tinyv_weight")
    mode = TINYV_MODES.get(str(setup))
    if mode is None:  # grade-ppo: rows of data source `grade`
        c.reward({"kind": "grade", "when": {"data_source": "grade"}}, *keys)
        c.reward({"kind": "math", "when": "otherwise"})
        return
    rubric = c.whose == "rrm"
    judge: dict[str, Any] = {"kind": "judge", "parser": "total_score" if rubric else "true_false", "model": judge_model(c)}
    judge["sampling"] = {"max_new_tokens": 2048 if rubric else 8}
    judge["limits"] = {"unreadable_retries": 3, "retry_temperature": 0.3}
    if not rubric:
        judge["view"] = {"extract": "answer"}
    cascade: dict[str, Any] = {"kind": "cascade", "when": {"data_source": JUDGED}, "mode": mode, "judge": judge}
    if mode != "only":
        cascade["rule"] = {"kind": "math"}
        if weight not in (None, 1, 1.0):
            cascade["judge_weight"] = weight
    c.reward(cascade, *keys)
    c.reward({"kind": "math", "when": "otherwise"})
    c.remark(
        "rewards.0.judge.template: the judge needs the prompt that it was trained with; write it into a .jinja file "
        "(docs/reward_models/judge.md)"
    )


def judge_model(c: Conversion) -> dict[str, Any]:
    """The model of the script's `vllm serve`; a stand-in if there is none."""
    server = c.source.server
    if server is None:
        c.remark("rewards.0.judge.model.path: the judge's model is not in the file (its launcher starts it with vllm serve)")
        return {"path": "${VERIFIER_MODEL}", "placement": "launch"}
    c.uses_server = True
    return served_model(server)


def served_model(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags of `vllm serve` as a reward's model: plaudit starts the server, waits for it, and stops it."""
    model: dict[str, Any] = {"path": str(flags.get("model", "${MODEL}")), "placement": "launch"}
    arguments = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if flag == "port":
            model["port"] = value
        elif flag not in ("model", "host", "api-key"):
            arguments += [
                f"--{flag}",
                *([] if value is True else [str(one) for one in (value if isinstance(value, list) else [value])]),
            ]
    return model | ({"arguments": arguments} if arguments else {})
