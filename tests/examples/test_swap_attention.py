import sys
from pathlib import Path

import keras_hub
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import swap_attention  # noqa: E402
from keras_efficient_attn import LocalAttention, benchmark  # noqa: E402
from keras_efficient_attn.benchmark.compare import run  # noqa: E402
from keras_efficient_attn.benchmark.settings import Settings  # noqa: E402
from tests.benchmark.fakes import InProcessWorker  # noqa: E402
from tests.models.swap import families  # noqa: E402

TINY = (
    "--length 16 --batch 4 --calibration 1 --test 1 --train-steps 2 --steps 2 "
    "--lengths 8 --verbose 0"
).split()
# As long as the texts: exact.
EXACT, COARSE = "local:window=16", "vq:window=1,num_codes=2"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Text, and an original and a benchmark that take no time."""
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(500)))
    from swapping import original

    sizes = dict(num_layers=2, num_heads=2, hidden_dim=8, intermediate_dim=8)
    monkeypatch.setattr(original, "SIZES", sizes)
    monkeypatch.setattr(
        "keras_efficient_attn.benchmark.workloads.MATMUL_SIZES",
        {"cpu": 16, "accelerator": 16},
    )

    def compare(layers, lengths, **options):
        settings = Settings(layers=layers, lengths=lengths, **options)
        return run(settings, start_worker=InProcessWorker)

    monkeypatch.setattr(benchmark, "compare", compare)
    return ["--text", str(text), *TINY]


def printed(capsys):
    """Lists of the cells of all lines that begin with a word, by that word."""
    rows = {}
    for line in filter(str.split, capsys.readouterr().out.splitlines()):
        name, *cells = line.split()
        rows.setdefault(name, []).append(cells)
    return rows


def test_from_training_to_a_preset(small, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    arguments = [*small, "--attention", EXACT, "--out", str(out)]
    assert swap_attention.main(arguments) == 0
    rows = printed(capsys)
    assert rows[EXACT][0][:3] == ["1.0000", "1.0000", "all"]
    # Timed, beside softmax, at the length asked for.
    for name in ("softmax", EXACT):
        assert any(cells[0] == "8" and float(cells[1]) > 0 for cells in rows[name])
    (after,) = rows["after"]
    assert float(after[after.index("cosine") + 1].rstrip(",")) > 0.9
    loaded = keras_hub.models.Backbone.from_preset(str(out / "preset"))
    found = families.stand_ins(loaded)
    assert len(found) == 2 and all(isinstance(v, LocalAttention) for v in found)

    # What is there stays.
    assert swap_attention.main(arguments) == 2
    assert "holds something" in capsys.readouterr().err


def test_of_a_preset_what_is_left_is_measured(small, tmp_path, capsys):
    backbone = families.make("bert")
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary=[
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            "sheep",
            *"0123456789,",
        ]
    )
    preset = str(tmp_path / "preset")
    keras_hub.models.BertTextClassifierPreprocessor(
        tokenizer, sequence_length=16
    ).save_to_preset(preset)
    backbone.save_to_preset(preset)
    arguments = [*small, "--preset", preset, "--steps", "0", "--lengths"]
    arguments += ["--attention", EXACT, COARSE, "--out", str(tmp_path / "out")]
    assert swap_attention.main(arguments) == 0
    rows = printed(capsys)
    assert rows[EXACT][0][:2] == ["1.0000", "1.0000"]
    assert 0 < float(rows[COARSE][0][1]) <= float(rows[COARSE][0][0]) < 0.999
    assert rows["0"][-1][1:] == ["0.00%", "0.00%"]
    assert not rows.get("after")
    # Its tokenizer comes with it.
    saved = str(tmp_path / "out" / "preset")
    again = keras_hub.models.TextClassifierPreprocessor.from_preset(saved)
    assert type(again) is keras_hub.models.BertTextClassifierPreprocessor
    assert again.tokenizer.vocabulary_size() == tokenizer.vocabulary_size()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "/nowhere"], "--preset /nowhere"),
        (["--layers", "0", "--budget", "0.1"], "exclude each other"),
        (["--text", "/nowhere"], "no such file"),
        (["--steps", "-1"], "not negative; received '-1'"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, arguments, message):
    arguments = ["--out", str(tmp_path / "out"), *arguments]
    assert swap_attention.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
