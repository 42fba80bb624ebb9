"""The script that times patterns: one tiny run."""

import measure_patterns


def test_all_contestants_are_timed(capsys):
    arguments = "--lengths 16 --modes forward --heads 1 --head-dim 4 --summary 2"
    assert measure_patterns.main([*arguments.split(), "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    for name in ("strided", "fixed", "local", "softmax, causal", "softmax, same mask"):
        assert f" {name} " in printed
