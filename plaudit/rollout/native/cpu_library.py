"""Compiles `cpu_kernels.c` for this processor with the system's C compiler, once: the library is kept in the cache folder.

Without a compiler the engine uses torch's own operations.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

from plaudit.data.token_cache import cache_folder

SOURCE = Path(__file__).with_name("cpu_kernels.c")
# No -ffast-math: linking with it would change how the whole process treats the smallest numbers.
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
DTYPE_FLAGS = {torch.float32: [], torch.bfloat16: ["-DBF16"]}
COMPILE_SECONDS = 60


class Attention(Structure):
    """As in cpu_kernels.c."""

    _fields_ = [
        ("query_heads", c_long), ("kv_heads", c_long), ("size", c_long),
        ("cos", c_void_p), ("sin", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("eps", c_float), ("scale", c_float), ("window", c_long),
    ]  # fmt: skip


SIGNATURES = {
    "add_norm": [c_void_p] * 5 + [c_long] * 2 + [c_float, c_int],
    "swiglu": [c_void_p] * 2 + [c_long] * 2 + [c_int],
    "rotate_and_attend": [c_void_p] * 3 + [c_long] * 2 + [c_void_p, c_long] * 2 + [POINTER(Attention), c_long, c_int],
    "product": [c_void_p] * 6 + [c_long] * 3 + [c_int],
    "pack": [c_void_p] * 2 + [c_long] * 2 + [c_int],
    "packed_product": [c_void_p] * 6 + [c_long] * 3 + [c_int],
    "lanes": [],
    "columns": [],
    "tile_sums": [c_void_p] * 2 + [c_long] * 3 + [c_int],
}


@cache
def library_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled operations for numbers of this dtype; None if there are none."""
    if dtype not in DTYPE_FLAGS or os.name != "posix":
        return None
    try:
        library = ctypes.CDLL(str(_compiled(dtype)))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int if not arguments else None
    return library


def _compiled(dtype: torch.dtype) -> Path:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise OSError("no C compiler")
    runtime = openmp_runtime()
    # Named before the compiler's own, which is then not needed, if it is another one.
    linked = ["-lm"] if runtime is None else ["-Wl,--as-needed", runtime, "-lm"]
    command = [compiler, *FLAGS, *DTYPE_FLAGS[dtype]]
    library = cache_folder() / "kernels" / f"{_digest([*command, *linked])}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # moved when complete: several processes may compile at once
        made = Path(folder) / library.name
        subprocess.run([*command, "-o", made, SOURCE, *linked], check=True, capture_output=True, timeout=COMPILE_SECONDS)
        made.replace(library)
    return library


def openmp_runtime() -> str | None:
    """The OpenMP library that torch has loaded. Some builds bring one under a name of its own; with the system's besides, there
    would be two sets of threads for the same cores."""
    try:
        loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    own = str(Path(torch.__file__).parent)  # other packages may have brought one too
    runtimes = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5"))]
    return min(runtimes, key=lambda path: (not path.startswith(own), path), default=None)


def _digest(command: list[str]) -> str:
    """Of all that the library depends on: home folders are shared between machines."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(repr((command, platform.machine(), _processor(), platform.libc_ver())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.lower().startswith(("model name", "flags", "features", "cpu part"))}))
