"""What is wrong with a data set: counted, with ids, either repaired or an error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vision_attn.errors import UserError

SHOWN = 5  # ids in a printed line; all of them are kept


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Files without the folder that all of them share: ``val.json``, or ``valid/_annotations.coco.json``.

    The bare name would not do: some exporters give the files of all splits the same one.
    """
    full = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(path) for path in full])
    return [os.path.relpath(path, shared) for path in full]


@dataclass
class Finding:
    """One kind of mistake in one file or folder.

    Attributes:
        kind: what is wrong, in a few words that are the same for every set.
        where: the file or folder.
        ids: of the images, annotations, categories or files concerned; ``of`` says which.
        of: ``"image"``, ``"annotation"``, ``"category"`` or ``"file"``; ``""`` when it concerns the file as a whole.
        repair: what was done about it; ``""`` when training refuses the set because of it.
        advice: what the user can do.
    """

    kind: str
    where: str
    ids: list[Any]
    of: str = "image"
    repair: str = ""
    advice: str = ""

    @property
    def count(self) -> int:
        """How many; 1 for the file as a whole."""
        return len(self.ids) if self.of else 1

    def __str__(self) -> str:
        unique = list(dict.fromkeys(self.ids))
        shown = ", ".join(map(str, unique[:SHOWN])) + (", …" if len(unique) > SHOWN else "")
        plural = {"category": "categories"}.get(self.of, f"{self.of}s")
        ids = f" ({self.of if len(unique) == 1 else plural} {shown})" if unique and self.of else ""
        text = f"{self.count} {self.kind}{ids}" if self.of else self.kind
        return f"{text}: {self.repair}" if self.repair else text


@dataclass
class Findings:
    """Collects what is wrong.

    Attributes:
        strict: raise for what cannot be repaired (training); otherwise collect that too (``check data``).
        found: in the order of discovery.
    """

    strict: bool = True
    found: list[Finding] = field(default_factory=list)

    def repaired(self, kind: str, where: object, ids: Iterable[Any], repair: str, *, of: str = "image") -> None:
        """Note a repair; nothing when there are no ids."""
        ids = list(ids)
        if ids:
            self.found.append(Finding(kind, str(where), ids, of, repair))

    def fatal(self, kind: str, where: object, ids: Iterable[Any], advice: str, *, of: str = "image") -> None:
        """Note what cannot be repaired; nothing when there are no ids and ``of`` is not empty.

        Raises:
            UserError: when strict.
        """
        finding = Finding(kind, str(where), list(ids), of, advice=advice)
        if of and not finding.ids:
            return
        if self.strict:
            raise UserError(f"{where}: {finding}. {advice}")
        self.found.append(finding)

    def attempt(self, where: object, work: Callable[[], Any]) -> Any:
        """``work()``; when not strict, its UserError becomes a finding and the result None."""
        try:
            return work()
        except UserError as error:
            if self.strict:
                raise
            self.found.append(Finding(str(error).removeprefix(f"{where}: "), str(where), [], of=""))
            return None

    def warn(self) -> None:
        """One warning for each file that was repaired."""
        for where in dict.fromkeys(finding.where for finding in self.found):
            lines = [str(finding) for finding in self.found if finding.where == where]
            warnings.warn(f"{where}: " + "; ".join(lines), stacklevel=3)
