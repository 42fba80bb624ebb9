"""The scripts that measure claims of the papers, at tiny sizes, and their parts."""

import math
import statistics

import keras
import numpy as np
import pytest

import claim_features
import claim_gates
import claim_length
import claim_rank
import claim_regression
import claim_spans
import claim_variants
from claims import byte_models, regression
from tables import markdown, mean_and_spread
from tests.autodiff import to_numpy

pytestmark = pytest.mark.any_backend

SMALL = "--dim 4 --heads 2 --layers 2 --steps 2 --batch 2 --windows 3 --length 8"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("claims") / "text"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 4000, "uint8"))
    return path


@pytest.fixture
def run(printed_table):
    """The header and the rows of the table that a script prints, as lists of cells."""

    def run(script, arguments):
        assert script.main(arguments.split()) == 0
        header, *rows = printed_table()
        return header, rows

    return run


def test_the_table_of_features_has_the_errors_of_taylors_polynomial(run):
    arguments = "--dim 2 --keys 5 --queries 4 --logits 0.5 --seeds 3"
    header, rows = run(claim_features, arguments)
    random = np.random.default_rng(3)
    query = (0.5**0.5 / 2**0.25 * random.normal(size=(4, 2))).astype("float32")
    key = (0.5**0.5 / 2**0.25 * random.normal(size=(5, 2))).astype("float32")
    value = random.normal(size=(5, 2))
    logits = query.astype("float64") @ key.T

    def attend(kernel):
        return kernel / kernel.sum(-1, keepdims=True) @ value

    expected = attend(np.exp(logits))
    for order, row in enumerate(rows, 1):
        kernel = sum(logits**i / math.factorial(i) for i in range(order + 1))
        error = np.linalg.norm(attend(kernel) - expected) / np.linalg.norm(expected)
        assert row[:3] == ["0.5", str(order), str(math.comb(2 + order, order))]
        assert float(row[header.index("Taylor")]) == pytest.approx(error, abs=6e-4)


def test_the_rate_of_regression_is_that_of_its_errors(run):
    header, rows = run(claim_regression, "rates --samples 20 320 --draws 1 --seeds 3")
    assert header == ["estimator", "20", "320", "exponent", "theorem"]
    assert [row[-1] for row in rows] == ["-0.67", "-0.50", "-0.80"]
    random = np.random.default_rng(3)
    points, errors = np.linspace(-0.5, 0.5, 100), []
    for size in (20, 320):
        samples = random.uniform(-1, 1, size=size)
        targets = np.sin(4 * samples) + 0.5 * random.normal(size=size)
        radius = size ** (1 / 5) / 0.3
        kernel = np.sinc(radius * np.subtract.outer(points, samples) / np.pi) ** 6
        found = kernel @ targets / kernel.sum(-1)
        errors.append(np.mean((found - np.sin(4 * points)) ** 2))
    exponent = math.log(errors[1] / errors[0]) / math.log(16)
    cells = [float(cell) for cell in rows[-1][1:4]]
    assert cells == pytest.approx([*(1000 * np.array(errors)), exponent], abs=0.006)
    for row in rows:
        first, last, exponent = (float(cell) for cell in row[1:4])
        fitted = math.log(last / first) / math.log(16)
        assert exponent == pytest.approx(fitted, abs=0.01)


def test_errors_on_correlated_features_are_those_of_the_kernels(run, monkeypatch):
    monkeypatch.setattr(regression, "HELD_OUT", 30)
    monkeypatch.setattr(regression, "POINTS", 20)
    arguments = "correlated --samples 40 --dims 2 --correlation 0.8 --seeds 3"
    header, rows = run(claim_regression, arguments)
    assert [row[:3] for row in rows] == [
        ["features", "2", "40"],
        ["factors", "2", "40"],
    ]
    random = np.random.default_rng(3)
    first, second = random.normal(size=(90, 2)).T
    features = np.stack([first, 0.8 * first + 0.6 * second], axis=-1)
    exact = np.sin(2 * features), np.sin(2 * np.stack([first, second], axis=-1))
    exact = np.stack([x.sum(-1) for x in exact], axis=-1)
    targets = exact + 0.5 * random.normal(size=(90, 2))
    difference = features[40:, None] - features[:40]
    precision = np.linalg.inv(np.cov(features[:40].T))
    square = np.einsum("pid,de,pie->pi", difference, precision, difference)
    kernels = {
        "Fourier": lambda h: (np.sinc(0.75**0.5 / h * difference / np.pi) ** 4).prod(
            -1
        ),
        "Gaussian, isotropic": lambda h: np.exp(-(difference**2).sum(-1) / (2 * h**2)),
        "Gaussian, full covariance": lambda h: np.exp(-square / (2 * h**2)),
    }
    for name, kernel in kernels.items():
        weights = [kernel(width) for width in regression.WIDTHS]
        found = np.array([w @ targets[:40] / w.sum(-1, keepdims=True) for w in weights])
        for column, row in enumerate(rows):
            own = found[..., column]
            chosen = ((own[:, :30] - targets[40:70, column]) ** 2).mean(1).argmin()
            error = ((own[chosen, 30:] - exact[70:, column]) ** 2).mean()
            expected = 100 * error / exact[70:, column].var()
            assert mean(row[header.index(name)]) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("rates --samples 9 9", "two sizes"), ("correlated --samples 4", "--dims 4")],
)
def test_too_few_samples_are_one_line(arguments, message, error_line):
    assert message in error_line(claim_regression, arguments.split())


def mean(cell):
    return float(cell.split(" ± ")[0])


def test_mean_and_spread_are_those_of_a_sample():
    values = [1.0, 2.0, 4.0]
    spread = np.std(values, ddof=1)
    assert mean_and_spread(values, 3) == f"{np.mean(values):.3f} ± {spread:.3f}"
    assert mean_and_spread([1.25], 1) == f"{statistics.fmean([1.25]):.1f}"
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_windows_of_all_lengths_score_the_same_bytes():
    text = np.random.default_rng(0).integers(0, 256, 100).astype("uint8")

    class Logits(keras.Model):
        """The model: a byte is as likely as the one before it says."""

        def call(self, inputs):
            return keras.ops.take(table, inputs["token_ids"], axis=0)

    table = np.random.default_rng(1).normal(size=(256, 256)).astype("float32")
    table = keras.ops.convert_to_tensor(table)
    measured = [
        byte_models.bits_per_byte(Logits(), text, length, 2, 5, 16)
        for length in (4, 16)
    ]
    # Windows end at 17, …, 100: evenly, and at the text's end.
    logits = to_numpy(table).astype("float64")
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ends = [int(x) for x in (17, 37.75, 58.5, 79.25, 100)]
    bits = [-math.log2(p[text[i - 1], text[i]]) for e in ends for i in (e - 2, e - 1)]
    np.testing.assert_allclose(measured, np.mean(bits), rtol=1e-5)


def test_length(text, run):
    header, rows = run(
        claim_length,
        f"{SMALL} --text {text} --lengths 8 20 --seeds 0 1 --attention softmax xl",
    )
    assert header == ["attention", "8", "20"]
    assert [row[0] for row in rows] == ["softmax", "xl"]
    # Hardly trained: any of 256 bytes.
    assert all(abs(mean(cell) - 8) < 1 for row in rows for cell in row[1:])


def test_ranks_are_at_most_the_number_of_features(run):
    arguments = (
        "--dim 4 --heads 2 --layers 2 --steps 2 --batch 2 --length 12 --symbols 5 "
        "--test-rows 9 --seeds 0 1 --attention performer:num_features=3 softmax"
    )
    header, rows = run(claim_rank, arguments)
    assert header[1:3] == ["rank, 1e-05", "rank, 0.01"]
    assert 1 <= mean(rows[0][1]) <= 3 and 1 <= mean(rows[1][1]) <= 12
    assert all(0 <= mean(row[3]) <= 100 for row in rows)
    # Hardly trained: any of 6 symbols.
    assert all(abs(mean(row[4]) - math.log2(6)) < 1 for row in rows)


def test_masked_symbols_are_in_the_other_copy():
    arguments = claim_rank.parse_arguments("--length 20 --symbols 7".split())
    inputs, targets = next(claim_rank.masked_copies(arguments, 6, seed=0))
    tokens, places = inputs["token_ids"], inputs["mask_positions"]
    masked = tokens == claim_rank.MASK
    assert np.all(masked.sum(1) == 3)
    np.testing.assert_array_equal(np.nonzero(masked)[1].reshape(6, 3), places)
    other = np.take_along_axis(tokens, (places + 10) % 20, axis=1)
    np.testing.assert_array_equal(targets, other)
    kept = ~masked & ~np.roll(masked, 10, axis=1)
    np.testing.assert_array_equal(tokens[kept], np.roll(tokens, 10, axis=1)[kept])


def test_spans(text, run):
    arguments = f"{SMALL} --text {text} --seeds 0 1 --max-span 8 --ramp 2"
    header, rows = run(claim_spans, f"{arguments} --penalties 0.1")
    assert header[2:] == ["bits per byte", "mean span", "by layer"]
    assert [row[:2] for row in rows] == [
        ["none", "0"],
        ["static", "0.1"],
        ["dynamic", "0.1"],
    ]
    assert mean(rows[0][3]) == 8
    for row in rows:
        by_layer = [mean(cell) for cell in row[4].split(", ")]
        assert len(by_layer) == 2 and abs(np.mean(by_layer) - mean(row[3])) <= 0.5
    assert all(0 < mean(row[3]) < 8 for row in rows[1:])


@pytest.mark.parametrize(
    ("claim", "names"),
    [
        ("auxiliary", ["post_norm, last loss only", "post_norm, two targets"]),
        ("sparse", ["full (softmax)", "fixed, interleaved"]),
        ("maps", ["elu + 1", "elu + 1, keys of twice the width"]),
        ("blocks", ["softmax", "one projection for queries and keys"]),
        (
            "blocks --positions sinusoidal",
            ["softmax", "one projection for queries and keys"],
        ),
    ],
)
def test_variants(claim, names, text, run):
    arguments = f"{claim} {SMALL} --text {text} --seeds 0 --stride 4"
    header, rows = run(claim_variants, arguments)
    assert header == ["model", "bits per byte"]
    assert [row[0] for row in rows][:2] == names
    assert all(abs(mean(row[1]) - 8) < 1 for row in rows)


def test_the_task_of_the_gates_names_the_stream():
    arguments = claim_gates.parse_arguments("--length 9 --delay 2 --symbols 5".split())
    inputs, targets, weights = next(claim_gates.streams(arguments, seed=0))
    tokens = inputs["token_ids"]
    for row, target, weight in zip(tokens, targets, weights, strict=True):
        assert row[0] in (25, 26)
        np.testing.assert_array_equal(weight, np.arange(9) > 2)
        for i in range(3, 9):
            assert target[i] == divmod(row[i - 2], 5)[row[0] - 25]


def test_the_bias_of_the_gates_is_set():
    arguments = claim_gates.parse_arguments("--dim 4 --heads 2 --layers 2".split())
    for kind, bias in (("gtrxl", 2.0), ("gtrxl-bias-0-scale", 0.0)):
        model = claim_gates.make_model(kind, 1e-3, 0, arguments)
        found = [w for w in model.weights if w.path.endswith("gate/bias")]
        assert len(found) == 4
        assert all(np.all(to_numpy(weight.value) == bias) for weight in found)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("final_norm", [False, True])
def test_scale_and_norm_are_separate(scale, final_norm):
    arguments = claim_gates.parse_arguments("--dim 4 --heads 2 --layers 1".split())
    kind = "gtrxl" + "-scale" * scale + "-norm" * final_norm
    backbone = claim_gates.make_model(kind, 1e-3, 0, arguments).backbone
    assert (backbone.decoder.final_norm is not None) == final_norm
    embedded = to_numpy(backbone.embedding(np.arange(3)[None]))
    table = to_numpy(backbone.token_embedding.embeddings)[None, :3]
    np.testing.assert_allclose(embedded, 2 * table if scale else table, rtol=1e-6)


def test_gates(run):
    arguments = (
        "--dim 4 --heads 2 --layers 1 --steps 2 3 --batch 2 --length 6 --symbols 3 "
        "--learning-rates 1e-3 1e-2 --seeds 0 --models xl gtrxl gtrxl-scale-norm"
    )
    header, rows = run(claim_gates, arguments)
    assert header == ["model", "steps", "0.001", "0.01", "90 % and more"]
    names = ["xl", "gtrxl", "gtrxl-scale-norm"]
    assert [row[:2] for row in rows] == [[n, s] for n in names for s in ("2", "3")]
    assert all(0 <= mean(cell) <= 100 for row in rows for cell in row[2:4])
    assert all(row[4].endswith(" of 2") for row in rows)


@pytest.mark.parametrize("script", [claim_gates, claim_length, claim_rank, claim_spans])
def test_wrong_arguments_are_one_line(script, error_line):
    assert "--heads" in error_line(script, ["--dim", "6", "--heads", "4"])


def test_rows_of_copies_are_even(error_line):
    assert "--length" in error_line(claim_rank, ["--length", "7"])


def test_too_little_text_is_one_line(text, error_line):
    arguments = f"sparse --text {text} --length 300".split()
    assert "200 bytes" in error_line(claim_variants, arguments)
