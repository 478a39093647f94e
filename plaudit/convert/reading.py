"""A file of another system → its settings by name: a launch script, a YAML file, a Python script, or lines `key=value`.

Nothing is run. Flags (`--learning_rate 1e-5`) and Hydra overrides (`+data.seed=1`) are read from the command that trains; a
`vllm serve` in the same script is the judge's server.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from plaudit.convert.python_scripts import read_python
from plaudit.convert.shell import Command, NotAScript, read_script
from plaudit.convert.values import flatten, parse_value
from plaudit.errors import PlauditError, nearest_path
from plaudit.recipe_file import build, compose

MAX_BYTES = 1_000_000
ASSIGNED = re.compile(r"(?P<key>[+~]{0,2}[A-Za-z_@][\w.@/-]*)=(?P<value>.*)", re.S)
SYSTEMS = ("verl", "llamafactory", "trl", "openrlhf")
VLLM_MODULE = "vllm.entrypoints.openai.api_server"
VLLM = "vllm"
"""A script that only starts a judge's server."""
SIGNS = {
    "verl": re.compile(r"^(actor_rollout_ref|trainer|algorithm|critic|reward_model|custom_reward_function)\."),
    "llamafactory": re.compile(r"^(stage|finetuning_type|cutoff_len|template|dataset_dir|pref_beta|pref_loss|lora_target)$"),
    "openrlhf": re.compile(
        r"^(pretrain|reward_pretrain|remote_rm_url|prompt_data|init_kl_coef|zero_stage|n_samples_per_prompt|rollout_batch_size|micro_train_batch_size"
        r"|(ds|ckpt|algo|rollout|vllm|actor|adam|eval|logger)\..*)$"
    ),
    "trl": re.compile(
        r"^(learning_rate|per_device_train_batch_size|model_name_or_path|model_name|num_generations|max_completion_length|dataset_name|beta)$"
    ),
    VLLM: re.compile(r"^(tensor[-_]parallel[-_]size|gpu[-_]memory[-_]utilization|max[-_]model[-_]len)$"),
}  # fmt: skip


@dataclass
class Source:
    """What a file says."""

    path: Path
    system: str
    settings: dict[str, Any]
    """As they are written there, `+` and `--` left out."""
    program: str = ""
    """The module or script that the settings are for."""
    server: dict[str, Any] | None = None
    """Flags of the `vllm serve` in the same script."""
    processes: int | None = None
    """Processes that the launcher starts (torchrun --nproc-per-node 8)."""
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read, and what to do."""


def read_source(path: Path, system: str = "auto") -> Source:
    text = _read_text(path)
    if path.suffix == ".py":
        source = Source(path, "trl", *read_python(text, path))
    elif path.suffix in (".yaml", ".yml", ".json") or (flat := _read_lines(text)) is None:
        source = _read_yaml(path, text) if path.suffix in (".yaml", ".yml", ".json") else _read_shell(path, text)
    else:
        source = Source(path, "", flat)
    if not source.settings:
        if source.notes:
            raise PlauditError(f"{path} has no settings itself: {'; '.join(source.notes)}")
        raise PlauditError(
            f"{path} has no settings of a system that plaudit convert reads. It should be the script or command that starts "
            "training, or the configuration it names (docs/convert.md)."
        )
    if system != "auto":
        source.system = system
    elif not source.system:
        source.system = _recognise(source.settings, path)
    return source


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise PlauditError(f"{path} does not exist.{nearest_path(path)}") from None
    except OSError as error:
        raise PlauditError(f"{path} cannot be read: {error}") from None
    if len(content) > MAX_BYTES or b"\0" in content:
        raise PlauditError(f"{path} is not a script or a configuration: it is binary, or has more than {MAX_BYTES // 1000} kB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlauditError(f"{path} is not a script or a configuration: it is not UTF-8 ({error.reason})") from None


def _recognise(settings: dict[str, Any], path: Path) -> str:
    """The system with the most keys that only it has."""
    counts = {system: sum(bool(sign.match(key)) for key in settings) for system, sign in SIGNS.items()}
    best = max(counts, key=lambda system: counts[system])
    if not counts[best]:
        raise PlauditError(
            f"{path}: these settings are of no system that plaudit convert knows ({', '.join(list(settings)[:3])}, …). "
            f"Name it with --from {'|'.join(SYSTEMS)}."
        )
    return best


def _read_lines(text: str) -> dict[str, Any] | None:
    """Lines `key=value`, comments and empty lines; None if there is any other line."""
    settings = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = ASSIGNED.fullmatch(line.strip())
        if match is None or match["key"].isupper() or match["value"].endswith("\\"):
            return None
        settings[match["key"].lstrip("+")] = parse_value(match["value"])
    return settings


def _read_yaml(path: Path, text: str) -> Source:
    try:
        node = compose(text)
        tree = None if node is None else build(node, (), {}, str(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise PlauditError(
            f"{path} is not valid YAML: {str(error).splitlines()[0] if str(error) else 'nested too deeply'}"
        ) from None
    if isinstance(tree, list):  # overrides that Hydra recorded
        tree = {key.lstrip("+"): parse_value(value) for key, _, value in (str(one).partition("=") for one in tree)}
    if not isinstance(tree, dict):
        raise PlauditError(f"{path} is not a configuration: it should be settings by name")
    return Source(path, "", {str(key): value for key, value in flatten(tree).items()})


# Launch scripts ------------------------------------------------------------------------------------------------------


def _read_shell(path: Path, text: str) -> Source:
    try:
        script = read_script(text)
    except NotAScript as error:
        raise PlauditError(f"{path} is not a script that can be read: {error}") from None
    source = Source(path, "", {}, not_run=script.not_run)
    for command in script.commands:
        if (flags := _server_flags(command.words)) is not None:
            source.server = flags
        elif (found := _training(command)) is not None:
            if source.settings:
                source.notes.append(f"line {command.line} starts another training: convert it from a file of its own")
                continue
            source.system, source.program, arguments = found
            source.processes = _processes(command.words)
            _read_arguments(source, arguments, path)
    if not source.settings and source.server is not None:
        source.system, source.settings, source.server = VLLM, source.server, None
    return source


def _training(command: Command) -> tuple[str, str, list[str]] | None:
    """(system, program, its arguments) of a command that trains, whatever launches it (python, torchrun, accelerate, ray)."""
    words = command.words
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        if word in ("-m", "--module") and i + 1 < len(words):
            module = words[i + 1]
            for system, pattern in (("verl", r"verl\.|recipe\..*main"), ("openrlhf", r"openrlhf\.cli\.train_"), ("trl", r"trl\.")):
                if re.match(pattern, module):
                    return system, module, words[i + 2 :]
        elif name in ("llamafactory-cli", "lmf") and words[i + 1 : i + 2] == ["train"]:
            return "llamafactory", name, words[i + 2 :]
        elif name == "trl" and i + 1 < len(words):
            return "trl", f"trl {words[i + 1]}", words[i + 2 :]
        elif name.endswith(".py") and i + 1 < len(words):
            arguments = words[i + 1 :]
            keys = {match["key"].lstrip("+"): None for one in arguments if (match := ASSIGNED.fullmatch(one))}
            keys |= {one.lstrip("-").partition("=")[0]: None for one in arguments if one.startswith("--")}
            counts = {system: sum(bool(sign.match(key)) for key in keys) for system, sign in SIGNS.items()}
            best = max(counts, key=lambda system: counts[system])
            named_file = any(one.endswith((".yaml", ".yml")) for one in arguments)  # the system is recognised by its settings
            return (best, name, arguments) if counts[best] else ("", name, arguments) if named_file else None
    return None


def _processes(words: Sequence[str]) -> int | None:
    """What torchrun, accelerate or deepspeed start, if it is a number: nodes × processes per node."""
    flags = {}
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flags[flag.lstrip("-").replace("-", "_")] = value if equals else words[i + 1] if i + 1 < len(words) else ""
    per_node = next((flags[name] for name in ("nproc_per_node", "num_processes", "num_gpus") if name in flags), "")
    nodes = flags.get("nnodes", "1")
    if not per_node.isdecimal() or not nodes.isdecimal():
        return None
    return int(per_node) * (int(nodes) if "nproc_per_node" in flags else 1)


def _read_arguments(source: Source, arguments: Sequence[str], path: Path) -> None:
    """Overrides `a.b=1`, flags `--a 1`, and configuration files that are named among them."""
    config: dict[str, str] = {}
    i = 0
    while i < len(arguments):
        word = arguments[i]
        i += 1
        if word.startswith("--") and len(word) > 2:
            name, values, i = _flag(arguments, i - 1)
            if name in ("config-path", "config-name", "config_file", "config", "config-dir"):
                config[name.replace("_", "-")] = values[0] if values else ""
                continue
            source.settings[name] = _flag_value(values)
        elif match := ASSIGNED.fullmatch(word):
            source.settings[match["key"].lstrip("+")] = parse_value(match["value"])
        elif word.endswith((".yaml", ".yml", ".json")):
            config["config"] = word
        elif word == "$@":
            source.notes.append("further arguments of the script ($@) are not in the file: add them to the recipe")
        elif word.strip():
            source.notes.append(f"the argument {word!r:.80} is neither a flag nor a setting: it was left out")
    if config:
        _read_config_file(source, config, path)


def _flag(words: Sequence[str], i: int) -> tuple[str, list[str], int]:
    """(name, its values, where the next one starts) of `--a 1 2`, `--a=1` or `--a`."""
    name, equals, text = words[i][2:].partition("=")
    values, i = [text] if equals else [], i + 1
    while not equals and i < len(words) and not words[i].startswith("--") and not ASSIGNED.fullmatch(words[i]):
        values.append(words[i])
        i += 1
    return name, values, i


def _flag_value(values: Sequence[str]) -> Any:
    if not values:
        return True
    return parse_value(values[0]) if len(values) == 1 else [parse_value(one) for one in values]


def _read_config_file(source: Source, config: dict[str, str], path: Path) -> None:
    """Settings of the file that a command names come first; those of the command replace them."""
    name = config.get("config") or config.get("config-file") or config.get("config-name", "")
    folder = Path(config.get("config-path") or config.get("config-dir") or ".")
    options = [path.parent / folder / name, folder / name, path.parent / name]
    options += [option.with_name(f"{option.name}.yaml") for option in options]
    found = next((option for option in options if option.is_file()), None)
    if found is None:
        if name != "ppo_trainer":  # verl's own
            source.notes.append(f"the configuration {folder / name} is not next to this file: convert that file")
        return
    source.settings = _read_yaml(found, _read_text(found)).settings | source.settings


def _server_flags(words: Sequence[str]) -> dict[str, Any] | None:
    """Flags of a command that starts a vLLM server: `vllm serve MODEL …` or its module; None if it is another command."""
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    elif VLLM_MODULE in words:
        words = words[words.index(VLLM_MODULE) + 1 :]
    else:
        return None
    flags: dict[str, Any] = {}
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if first:
        flags["model"] = " ".join(words[:first])
    i = first
    while i < len(words):
        name, values, i = _flag(words, i)
        flags[name] = _flag_value(values)
    return flags
