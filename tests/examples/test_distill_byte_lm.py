import json
from pathlib import Path

import keras
import numpy as np
import pytest

import distill_byte_lm

TINY = (
    "--length 16 --dim 16 --heads 2 --layers 1 --batch 2 --steps 2 --transfer-steps 1 "
    "--distill-steps 1 --test-bytes 600 --generated 4 --prompts 2 --time-lengths 24 "
    "--verbose 0 --attention performer:feature_map=learned,window=4"
).split()


@pytest.mark.any_backend
def test_teacher_is_kept_and_student_measured(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(3000)))
    folders = ["--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "out")]
    arguments = [*TINY, "--text", str(text), *folders]
    assert distill_byte_lm.main([*arguments, "--only-teacher"]) == 0
    teacher = tmp_path / "teacher" / "seed-0" / "teacher.keras"
    kept = teacher.stat().st_mtime_ns
    save = ["--save", str(tmp_path / "table.json")]
    assert distill_byte_lm.main([*arguments, "--seeds", "0", "1", *save]) == 0
    assert teacher.stat().st_mtime_ns == kept
    results = [
        json.loads((tmp_path / "out" / f"seed-{seed}" / "result.json").read_text())
        for seed in (0, 1)
    ]
    result = results[0]
    assert result["lengths"] == [16, 64, 256]
    # Beyond the teacher at 64, by seed.
    rows = (each["rows"] for each in results)
    beyond = [each["distilled, as it is"][1] - each["teacher"][1] for each in rows]
    expected = f"{np.mean(beyond):.3f} ± {np.std(beyond, ddof=1):.3f}"
    table = json.loads((tmp_path / "table.json").read_text())
    cells = {row[0]: row[1:] for row in table["rows"]}
    assert table["header"][5] == "beyond the teacher at 64"
    assert cells["distilled, as it is"][4] == expected
    assert cells["distilled, window only"][-1] == "-"
    # An untrained model of 256 bytes is near chance: about 8 bits.
    assert all(6 < bits < 10 for row in result["rows"].values() for bits in row[:3])
    assert result["rows"]["teacher"][-1] == 4
    assert result["rows"]["distilled, window only"][-1] is None
    assert "100.0% of the teacher's 2" in capsys.readouterr().out
    assert (tmp_path / "out" / "seed-0" / "result.png").exists()
    student = keras.saving.load_model(tmp_path / "out" / "seed-0" / "student.keras")
    (adapter,) = student.backbone.attention_adapters
    assert adapter.attention.window == 4

    from distilling.measures import agreement

    same = np.arange(8).reshape(2, 4)
    other = same.copy()
    other[1, 2] = 0
    assert agreement(same, other) == 3.0

    for option, old, new in (
        ("length", 16, 32),
        ("steps", 2, 3),
        ("dim", 16, 32),
        ("layers", 1, 2),
        ("heads", 2, 4),
        ("batch", 2, 4),
        ("learning-rate", 0.004, 0.01),
    ):
        assert distill_byte_lm.main([*arguments, f"--{option}", str(new)]) == 2
        message = f"trained with --{option} {old}: pass the same"
        assert message in capsys.readouterr().err
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes())
    assert distill_byte_lm.main([*arguments, "--text", str(other)]) == 2
    assert "trained with --text" in capsys.readouterr().err
    record = tmp_path / "teacher" / "seed-0" / "teacher.json"
    said = json.loads(record.read_text())
    del said["batch"]
    record.write_text(json.dumps(said))
    assert distill_byte_lm.main(arguments) == 2
    message = "teacher.json does not say with which --batch the teacher was trained"
    assert message in capsys.readouterr().err
    record.unlink()
    assert distill_byte_lm.main(arguments) == 2
    assert "teacher.json" in capsys.readouterr().err


@pytest.mark.any_backend
def test_a_teacher_whose_training_was_killed_is_trained_again(
    tmp_path, monkeypatch, capsys
):
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(3000)))
    arguments = [*TINY, "--text", str(text), "--teacher", str(tmp_path / "teacher")]
    arguments += ["--only-teacher", "--out", str(tmp_path / "out")]

    def kill(self, path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            distill_byte_lm.main(arguments)
    assert distill_byte_lm.main(arguments) == 0
    assert keras.saving.load_model(tmp_path / "teacher" / "seed-0" / "teacher.keras")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window-dropout", "2"], "a number from 0 to 1; received '2'"),
        (["--attention", "local:window=4"], "no weights of its own to train"),
        (["--attention", "local:window=-1"], "--attention local:window=-1"),
    ],
)
def test_what_cannot_be_distilled_is_said_before_training(
    tmp_path, error_line, arguments, message
):
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(3000)))
    folders = ["--teacher", str(tmp_path / "t"), "--out", str(tmp_path / "out")]
    arguments = [*TINY, "--text", str(text), *folders, *arguments]
    assert message in error_line(distill_byte_lm, arguments)
    assert not (tmp_path / "t" / "seed-0" / "teacher.keras").exists()
