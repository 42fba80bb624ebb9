import numpy as np
import pytest

import text_classification
from text_classes import data

pytestmark = pytest.mark.any_backend

TINY = (
    "--length 24 --layers 1 --dim 8 --heads 2 --batch 8 --steps 25 --test-windows 5 "
    "--learning-rate 0.05 --verbose 0"
).split()


@pytest.fixture
def table(tmp_path):
    """Two classes that differ in one letter."""
    path = tmp_path / "texts.csv"
    rows = [f'"{letter * 30} {i}",{letter}' for letter in "qz" for i in range(12)]
    path.write_text("\n".join(["text,label", *rows, ""]))
    return path


def test_files_are_held_out_whole_and_always_the_same(tmp_path):
    for package in ("one", "two", "small"):
        (tmp_path / package).mkdir()
        for i in range(8):
            text = f"# {package} {i}\n" * (10 if package == "small" else 1000)
            (tmp_path / package / f"{i}.py").write_text(text)
    texts = data.standard_library(8, tmp_path)
    assert texts.labels == ["one", "two"]
    for label, train, test in zip(texts.labels, texts.train, texts.test, strict=True):
        assert (len(train), len(test)) == (6, 2)
        assert not set(train) & set(test)
        assert all(text.startswith(f"# {label}".encode()) for text in train + test)
    assert data.standard_library(8, tmp_path) == texts


def test_the_standard_library_has_packages_enough():
    texts = data.standard_library(8)
    assert len(texts.labels) == 8
    assert all(
        len(train) > len(test) >= 1
        for train, test in zip(texts.train, texts.test, strict=True)
    )


def test_windows_are_pieces_of_the_texts():
    texts = data.Texts(
        ["a", "b"], [[b"abcdefgh", b"ij"]] * 2, [[b"klmnopqrst"], [b"u"]]
    )
    stream = data.batches(texts, length=4, batch=20, seed=3)
    inputs, labels = next(stream)
    for tokens, mask in zip(inputs["token_ids"], inputs["padding_mask"], strict=True):
        piece = bytes(tokens[mask == 1].astype("uint8"))
        assert piece == b"ij" or (len(piece) == 4 and piece in b"abcdefgh")
        assert (tokens[mask == 0] == 0).all()
    assert set(labels) == {0, 1}
    again, _ = next(data.batches(texts, length=4, batch=20, seed=3))
    np.testing.assert_array_equal(again["token_ids"], inputs["token_ids"])
    other, _ = next(stream)
    assert (other["token_ids"] != inputs["token_ids"]).any()

    inputs, labels = data.test_windows(texts, length=4, most=10)
    pieces = [bytes(row[row > 0].astype("uint8")) for row in inputs["token_ids"]]
    assert pieces == [b"klmn", b"opqr", b"u"]
    assert labels.tolist() == [0, 0, 1]


def test_it_learns_and_compares(table, printed_table, capsys):
    arguments = [*TINY, "--csv", str(table), "--attention", "performer:feature_map=elu"]
    assert text_classification.main(arguments) == 0
    printed = capsys.readouterr().out
    _, *rows = printed_table(printed)
    assert [row[0] for row in rows] == ["performer:feature_map=elu", "softmax"]
    for row in rows:
        assert row[1] == "100.0%"
        assert float(row[2]) > 0
    assert "chance 50.0%" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("contents", "arguments", "message"),
    [
        ("text,label\na,b\n", [], "two labels"),
        ("a,b\nc,d\n", [], "columns text and label"),
        ("text,label\na,x\nb\n", [], "a row lacks"),
        (None, [], "No such file"),
        (None, ["--steps", "x"], "positive integer; received 'x'"),
        (None, ["--learning-rate", "-1"], "positive number; received '-1'"),
        ("text,label\na,x\nb,x\nc,y\nd,y\n", ["--attention", "nothing"], "nothing"),
    ],
)
def test_errors_are_one_line(tmp_path, error_line, contents, arguments, message):
    path = tmp_path / "texts.csv"
    if contents:
        path.write_text(contents)
    arguments = ["--csv", str(path), *arguments]
    assert message in error_line(text_classification, arguments)
