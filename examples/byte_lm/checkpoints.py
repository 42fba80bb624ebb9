"""Checkpoints that survive a kill at any moment and detect damage."""

import hashlib
import json
import os
import re
from pathlib import Path

import keras

from command_line import UsageError

KEPT = 2


class Checkpoints:
    """The last checkpoints of a run, in one folder.

    A checkpoint is `checkpoint-<step>.keras`, with the model and its optimizer, and
    `checkpoint-<step>.json`, with the run's record and a hash of both. Each is written
    under a temporary name, flushed to disk and then renamed, the JSON last. A file with
    its final name is complete, unless the disk damaged it later.

    Args:
        folder: Folder of the checkpoints; created on the first write.
    """

    def __init__(self, folder):
        self.folder = Path(folder)

    def steps(self):
        """Steps that have a checkpoint, the newest first."""
        names = (path.name for path in self.folder.glob("checkpoint-*.json"))
        found = (re.fullmatch(r"checkpoint-(\d+)\.json", name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def save(self, model, record):
        """Writes a checkpoint, then removes all but the last two.

        Reports a full or failing disk; earlier checkpoints stay.

        Args:
            model: The compiled model.
            record: A dict for JSON; `record["step"]` names the checkpoint.
        """
        model_path, record_path = self._paths(record["step"])
        try:
            self._write(model, record, model_path, record_path)
        except OSError as error:
            # Without its record, the model is not a checkpoint.
            for path in (_unfinished(model_path), _unfinished(record_path), model_path):
                path.unlink(missing_ok=True)
            kept = [self._paths(step)[0].name for step in self.steps()[:1]]
            print(
                f"{model_path} could not be written: {error}. The last checkpoint: "
                f"{kept[0] if kept else 'none'}",
                flush=True,
            )
            return
        for step in self.steps()[KEPT:]:
            # The record first: without it, there is no checkpoint.
            for path in reversed(self._paths(step)):
                path.unlink(missing_ok=True)

    def restore(self, check=lambda record: None):
        """The newest intact checkpoint; damaged ones are reported.

        Args:
            check: Called with the record before the model is loaded; raises
                `UsageError` if this is not the run to resume.

        Returns:
            `(model, record)`.

        Raises:
            UsageError: If no checkpoint is intact.
        """
        for step in self.steps():
            model_path, record_path = self._paths(step)
            try:
                text = record_path.read_text()
                record = json.loads(text)
                record.pop("sha256", None)
                damage = None
                if _seal(record, model_path) != text:
                    damage = "it or its record changed since it was written"
            except (OSError, ValueError) as error:
                damage = str(error)
            if damage:
                print(f"{model_path} is damaged and not used: {damage}", flush=True)
                continue
            check(record)
            return keras.saving.load_model(model_path), record
        raise UsageError(
            f"--resume: all checkpoints in {self.folder} are damaged; start afresh "
            "with another --out"
        )

    def _write(self, model, record, model_path, record_path):
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = _unfinished(model_path)
        model.save(temporary)
        text = _seal(record, temporary)
        _settle(temporary, model_path)
        write_text(record_path, text)

    def _paths(self, step):
        stem = self.folder / f"checkpoint-{step}"
        return stem.with_suffix(".keras"), stem.with_suffix(".json")


def write_text(path, text):
    """Writes a file atomically: it holds either the old or the new text."""
    path = Path(path)
    temporary = _unfinished(path)
    temporary.write_text(text)
    _settle(temporary, path)


def _unfinished(path):
    return path.with_name(f"unfinished-{path.name}")


def _settle(temporary, path):
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _seal(record, model_path):
    """The text of a checkpoint's record, with a hash of it and of the model."""
    with open(model_path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(record).encode())
    return json.dumps({**record, "sha256": digest.hexdigest()})
