"""Checkpoints that survive a kill at any moment, and notice damage."""

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
    `checkpoint-<step>.json`, with the run's record and the hash of the former. Each
    is written under another name, flushed to disk and then renamed, the JSON last:
    what bears its final name is complete, unless the disk damaged it later.

    Args:
        folder: Where they are; made when first written to.
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

        Args:
            model: The compiled model.
            record: A dict for JSON; `record["step"]` names the checkpoint.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        model_path, record_path = self._paths(record["step"])
        temporary = self.folder / f"unfinished-{model_path.name}"
        model.save(temporary)
        record = {**record, "sha256": _sha256(temporary)}
        _settle(temporary, model_path)
        write_text(record_path, json.dumps(record))
        for step in self.steps()[KEPT:]:
            # The record first: without it, there is no checkpoint.
            for path in reversed(self._paths(step)):
                path.unlink(missing_ok=True)

    def restore(self, check=lambda record: None):
        """The newest checkpoint that is whole; damaged ones are reported.

        Args:
            check: Called with the record before the model is loaded; raises
                `UsageError` if this is not the run to go on with.

        Returns:
            `(model, record)`.

        Raises:
            UsageError: If none is whole.
        """
        for step in self.steps():
            model_path, record_path = self._paths(step)
            try:
                record = json.loads(record_path.read_text())
                damage = None
                if _sha256(model_path) != record["sha256"]:
                    damage = "its contents changed since it was written"
            except (OSError, ValueError, KeyError) as error:
                damage = str(error)
            if damage:
                print(f"{model_path} is damaged and not used: {damage}", flush=True)
                continue
            check(record)
            return keras.saving.load_model(model_path), record
        raise UsageError(f"--resume: all checkpoints in {self.folder} are damaged")

    def _paths(self, step):
        stem = self.folder / f"checkpoint-{step}"
        return stem.with_suffix(".keras"), stem.with_suffix(".json")


def write_text(path, text):
    """Writes a file so that it is either the old one or the new one, never half."""
    path = Path(path)
    temporary = path.with_name(f"unfinished-{path.name}")
    temporary.write_text(text)
    _settle(temporary, path)


def _settle(temporary, path):
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
