"""Checkpoints of the byte model on failing disks; the script's tests damage them."""

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from byte_lm import checkpoints
from byte_lm.checkpoints import Checkpoints
from command_line import UsageError

pytestmark = pytest.mark.any_backend


class Model:
    """Saves some bytes; a full disk accepts only the first."""

    full = False

    def save(self, path):
        Path(path).write_bytes(b"half" if self.full else b"half and half")
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saved(folder):
    model, kept = Model(), Checkpoints(folder)
    kept.save(model, {"step": 4})
    return model, kept


def check_first_is_kept(folder, kept, printed):
    assert "checkpoint-8.keras could not be written" in printed
    assert "No space left on device" in printed
    assert "The last checkpoint: checkpoint-4.keras" in printed
    assert kept.steps() == [4]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint-4.json", "checkpoint-4.keras"]
    assert (folder / "checkpoint-4.keras").read_bytes() == b"half and half"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command).returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_is_full_keeps_the_last_checkpoint(small_disk, capsys):
    model, kept = saved(small_disk)
    model.save = lambda path: Path(path).write_bytes(bytes(2**20))
    kept.save(model, {"step": 8})
    check_first_is_kept(small_disk, kept, capsys.readouterr().out)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(tmp_path, capsys):
    model, kept = saved(tmp_path)
    model.full = True
    kept.save(model, {"step": 8})
    check_first_is_kept(tmp_path, kept, capsys.readouterr().out)
    model.full = False
    kept.save(model, {"step": 12})
    assert kept.steps() == [12, 4]


def test_a_disk_without_room_for_the_record_keeps_the_last_one(
    tmp_path, capsys, monkeypatch
):
    model, kept = saved(tmp_path)

    def write_text(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_text", write_text)
    kept.save(model, {"step": 8})
    check_first_is_kept(tmp_path, kept, capsys.readouterr().out)


def test_a_first_checkpoint_that_fails_leaves_none(tmp_path, capsys):
    model, kept = Model(), Checkpoints(tmp_path / "new")
    model.full = True
    kept.save(model, {"step": 4})
    assert "The last checkpoint: none" in capsys.readouterr().out
    assert kept.steps() == []


@pytest.mark.parametrize("kind", ["keras", "json"])
def test_a_cut_or_a_changed_byte_is_named_and_the_checkpoint_before_is_used(
    tmp_path, capsys, kind
):
    model, kept = saved(tmp_path)
    kept.save(model, {"step": 8, "loss": 0.1, "seed": 10})
    path = tmp_path / f"checkpoint-8.{kind}"
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    for place in range(len(whole)):
        for bit in (1, 2, 128):
            changed = bytearray(whole)
            changed[place] ^= bit
            damaged.append(changed)

    def check(record):
        # Before the model is loaded, which this one cannot be.
        raise UsageError(f"step {record['step']}")

    for contents in damaged:
        path.write_bytes(contents)
        with pytest.raises(UsageError, match="^step 4$"):
            kept.restore(check)
        named = re.escape(f"{tmp_path}/checkpoint-8.keras is damaged and not used: ")
        assert re.match(named, capsys.readouterr().out)
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="^step 8$"):
        kept.restore(check)
