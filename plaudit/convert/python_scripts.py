"""Arguments of TRL's configs and trainers in a Python script, read from its syntax: nothing is imported or run."""

import ast
import re
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError

CONFIGS = re.compile(
    r"(GRPO|RLOO|DPO|SFT|Reward|Lora|Model|Peft|BitsAndBytes)Config|TrainingArguments|ScriptArguments|(GRPO|RLOO|DPO|SFT|Reward)Trainer"
)
NOT_SETTINGS = ("args", "processing_class", "tokenizer", "callbacks", "optimizers", "data_collator", "compute_metrics")
PREFIXED = {"LoraConfig": "lora_config.", "PeftConfig": "lora_config.", "BitsAndBytesConfig": "quantization_config."}


def read_python(text: str, path: Path) -> tuple[dict[str, Any], str]:
    """Settings by name, and the config class. A value that is no literal is kept as it is written, as `$(expression)`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlauditError(f"{path} is not a Python script: {getattr(error, 'msg', None) or error}") from None
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    settings: dict[str, Any] = {}
    program = ""
    for node in ast.walk(tree):
        name = _called(node)
        if not isinstance(node, ast.Call) or not CONFIGS.fullmatch(name):
            continue
        if name.endswith("Trainer") and node.args:
            settings.setdefault("model", _value(node.args[0], constants))
        if name.startswith(("GRPO", "RLOO", "DPO", "SFT", "Reward")):
            program = program or name
        prefix = PREFIXED.get(name, "")
        for keyword in node.keywords:
            if keyword.arg is None:
                settings[f"{prefix}(unpacked)"] = f"$({_written(keyword.value)})"
            elif keyword.arg not in NOT_SETTINGS and not (keyword.arg == "peft_config" and _called(keyword.value)):
                settings[f"{prefix}{keyword.arg}"] = _value(keyword.value, constants)
    return settings, program


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _value(node: ast.expr, constants: dict[str, ast.expr], depth: int = 0) -> Any:
    if isinstance(node, ast.Name) and node.id in constants and depth < 5:
        return _value(constants[node.id], constants, depth + 1)
    if isinstance(node, ast.Call) and _called(node) == "load_dataset":
        return _dataset(node, constants)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return f"$({_written(node)})"
    return list(value) if isinstance(value, tuple) else value


def _dataset(node: ast.Call, constants: dict[str, ast.expr]) -> Any:
    """`load_dataset("json", data_files="x.jsonl")` is the file; `load_dataset("org/name", split="train")` the data set "
    "on the hub."""
    named = {keyword.arg: _value(keyword.value, constants) for keyword in node.keywords}
    if "data_files" in named:
        return named["data_files"]
    first = _value(node.args[0], constants) if node.args else named.get("path")
    return f"{first}:{named['split']}" if isinstance(named.get("split"), str) else first


def _written(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else f"{text[:77]}…"
