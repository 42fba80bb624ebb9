"""The script that kills training: what it reads of the runs that it killed."""

import sys
import time

import pytest

from tests.examples.kill_training import after, check_log, kill_at

pytestmark = pytest.mark.any_backend


def run(line, log):
    """A run that prints a line and is killed once it has."""
    printed = len(log.read_text()) if log.exists() else 0
    command = f"import time; print({line!r}, flush=True); time.sleep(60)"
    late = after(30)

    def moment():
        return late() or log.exists() and len(log.read_text()) > printed

    assert kill_at(moment, [sys.executable, "-c", command], log)


def test_damage_that_an_earlier_run_reports_is_found(tmp_path):
    log = tmp_path / "log"
    start = time.monotonic()
    run("checkpoint-2.keras is damaged and not used: cut short", log)
    run("Going on from step 4 of 8.", log)
    assert time.monotonic() - start < 60
    with pytest.raises(SystemExit, match="checkpoint-2.keras is damaged"):
        check_log(log)


def test_runs_without_damage_pass(tmp_path):
    log = tmp_path / "log"
    run("Going on from step 4 of 8.", log)
    check_log(log)
