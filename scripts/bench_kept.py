"""What a long benchmark has measured so far, kept in a folder so that an interrupted one goes on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """Results by name, one file each. What was measured with other settings or at another commit is
    measured again; edits that are not committed go unnoticed."""

    folder: Path
    settings: Mapping[str, Any]

    def find(self, name: str) -> Any | None:
        path = self._path(name)
        if not path.exists():
            return None
        kept = json.loads(path.read_text())
        return kept["result"] if kept["settings"] == self._plain_settings() else None

    def keep(self, name: str, result: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"settings": self._plain_settings(), "result": result}) + "\n"
        path = self._path(name)
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").replace(path)

    def find_or(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is kept, or what is measured now and then kept."""
        if (found := self.find(name)) is not None:
            return found
        result = json.loads(json.dumps(measure()))  # the same types in both cases
        self.keep(name, result)
        return result

    def forget(self) -> None:
        """Everything is to be measured anew."""
        for path in self.folder.glob("*.json"):
            path.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _plain_settings(self) -> Any:
        return json.loads(json.dumps(dict(self.settings)))
