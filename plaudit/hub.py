"""The Hugging Face hub: what is not on this disk, looked up once and within a few seconds.

A name that exists here is never looked up there, nor is one that can only be a path. Whatever the hub provides is used from its
cache, as a folder, so that the libraries which load it make no requests of their own (transformers retries each for almost a
minute).
"""

import math
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Literal

from plaudit.errors import RecipeError, nearest_path
from plaudit.redaction import redact

LIMIT_S = 5.0
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".txt", ".yaml", ".jinja", ".safetensors", ".bin", ".gguf")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "value_head.safetensors")
"""A model's config, tokenizer, chat template, code and value head."""
NOT_MODEL_FILES = ("*/*", "consolidated*")
"""Files in subfolders are other formats of the same weights, and so is what Mistral calls consolidated."""
OUR_FOLDERS = ("models/", "runs/", "data/", "recipes/")
"""Where the recipes and pages of plaudit put models and data: not names on the hub."""
Kind = Literal["model", "dataset"]


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: hub names are `org/name`, and `org` is not a folder here."""
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") != 1
        or name.lower().endswith(SUFFIXES)
        or os.path.isdir(Path(name).parent)
        or name.startswith(OUR_FOLDERS)
    )


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model or tokenizer: `name` itself if it exists, else the hub's, downloaded into its cache.

    Without `weights`, only its config and tokenizer are downloaded."""
    if os.path.exists(name):
        return Path(name)
    if looks_local(name):
        raise RecipeError(f"{name}: no such folder.{nearest_path(Path(name))}")
    return _download(name, weights)


@cache
def _download(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    allowed = [*SMALL_FILES, "*.safetensors"] if weights else [*SMALL_FILES]
    ignored, problem = [*NOT_MODEL_FILES], find_problem(name, "model")
    try:
        cached_only = problem is not None
        return Path(snapshot_download(name, allow_patterns=allowed, ignore_patterns=ignored, local_files_only=cached_only))
    except Exception as error:  # of whichever HTTP library this version uses
        if problem is not None:
            raise RecipeError(f"there is no folder {name} here, and {problem}") from None
        raise RecipeError(f"{name} could not be downloaded from the Hugging Face hub: {_reason(error)}") from None


KEPT_S = 60.0
"""How long a problem is remembered. Not for good: a notebook continues after its user has set HF_TOKEN or found the network."""
_looked_up: dict[tuple[str, Kind, str | None], tuple[float, str | None]] = {}
"""When the hub was queried, and the problem."""


def find_problem(name: str, kind: Kind, revision: str | None = None) -> str | None:
    """Why the hub cannot provide a model or data set, as a clause for an error message; None if it can."""
    when, problem = _looked_up.get((name, kind, revision), (-math.inf, None))
    if time.monotonic() - when < (KEPT_S if problem else math.inf):
        return problem
    found: list[str | None] = []
    # In a thread, because no timeout of the library covers a name server that does not answer.
    thread = threading.Thread(target=lambda: found.append(_query(name, kind, revision)), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    problem = found[0] if found else f"the Hugging Face hub did not answer within {LIMIT_S:g} s"
    _looked_up[name, kind, revision] = time.monotonic(), problem
    return problem


def _query(name: str, kind: Kind, revision: str | None) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = "data set" if kind == "dataset" else "model"
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=LIMIT_S)
    except OfflineModeIsEnabled:
        return "the Hugging Face hub is switched off by HF_HUB_OFFLINE"
    except GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name}"
        return f"the {what} on the Hugging Face hub is gated: accept its terms on {page} and set HF_TOKEN"
    except RevisionNotFoundError:
        return f"the {what} on the Hugging Face hub has no revision {revision}"
    except (RepositoryNotFoundError, HFValidationError):
        return f"the Hugging Face hub has no such {what} (for a private one, set HF_TOKEN)"
    except Exception as error:  # of whichever HTTP library this version uses
        return f"the Hugging Face hub could not be reached: {_reason(error)}"
    return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {redact(' '.join(str(error).split()))[:200]}"
