"""The samples of a run, as files: `samples/train_000012.parquet`, `samples/val_000010.parquet`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from plaudit.data.templates import ChatTemplate
from plaudit.files import remove_leftovers
from plaudit.recipe import RLRunSettings
from plaudit.report.samples import TokenDetails, Trained, kept_steps, write_samples
from plaudit.types import ScoredGroup


class SampleFiles:
    def __init__(self, folder: Path, settings: Any, template: ChatTemplate | None):
        """`settings`: the recipe's `run`. Stages without samples have none of those that matter here."""
        self.folder = folder / "samples"
        self._keep: int | Literal["all"] = "all"
        self._tokens: TokenDetails | None = None
        if isinstance(settings, RLRunSettings):
            self._keep = settings.keep_samples
            if settings.keep_tokens and template is not None:
                self._tokens = TokenDetails(settings.keep_tokens, template.tokenizer.decode)  # pyright: ignore[reportArgumentType]

    def file(self, part: Literal["train", "val"], step: int) -> Path:
        return self.folder / f"{part}_{step:06d}.parquet"

    def write(self, part: Literal["train", "val"], step: int, groups: Sequence[ScoredGroup], trained: Trained | None) -> None:
        """The samples of a step; of earlier steps, those that `run.keep_samples` does not keep are deleted."""
        self.folder.mkdir(exist_ok=True)
        write_samples(self.file(part, step), groups, trained, self._tokens)
        if part == "train" and self._keep != "all":
            files = self._files("train")
            for other in files.keys() - kept_steps(sorted(files), self._keep):
                files[other].unlink()

    def drop_after(self, step: int) -> None:
        """Delete what a resumed run makes again."""
        remove_leftovers(self.folder, ["train_*.parquet", "val_*.parquet"])
        for part in ("train", "val"):
            for other, file in self._files(part).items():
                if other > step:
                    file.unlink()

    def _files(self, part: str) -> dict[int, Path]:
        found = {file: re.fullmatch(rf"{part}_(\d{{6,}})", file.stem) for file in self.folder.glob("*.parquet")}
        return {int(ours[1]): file for file, ours in found.items() if ours}
