import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from matplotlib import image

import train_byte_lm
from byte_lm import data, training
from byte_lm.checkpoints import Checkpoints
from byte_lm.model import BitsPerByte, build_model, equal_widths
from byte_lm.sampling import sample
from command_line import UsageError

STEPS = 24
# One file of the standard library is enough text.
TEXT = json.decoder.__file__
TINY = (
    "--length 32 --layers 1 --dim 16 --heads 2 --batch 2 "
    f"--steps {STEPS} --epoch-steps 4 --sample-bytes 5 --test-bytes 500 "
    "--attention linear:rotary_wavelength=100"
).split() + ["--text", TEXT]


def weights_of(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.variables]


def assert_same_weights(folder, expected):
    model = keras.saving.load_model(Path(folder, "model.keras"))
    for weight, other in zip(weights_of(model), weights_of(expected), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def short_texts():
    """Samples continue a few bytes, and few are validated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "PROMPT_BYTES", 24)
        patch.setattr(training, "VALIDATION_BYTES", 66)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, short_training_is_not_traced):
    """The folder of an uninterrupted run, started with `--resume` from nothing."""
    out = tmp_path_factory.mktemp("finished")
    with short_training_is_not_traced():
        assert train_byte_lm.main([*TINY, "--out", str(out), "--resume"]) == 0
    return out


@pytest.fixture(scope="module")
def trained(finished):
    return keras.saving.load_model(finished / "model.keras")


# Data.


def test_files_are_split_by_name_and_never_shared():
    sizes = {f"folder/{i}.py": 10 + i for i in range(200)}
    groups = data.assign_files(sizes)
    shuffled = data.assign_files(dict(reversed(sizes.items())))
    assert groups == shuffled
    assert sorted(sum(groups.values(), [])) == sorted(sizes)
    total = sum(sizes.values())
    for split in ("validation", "test"):
        part = sum(sizes[name] for name in groups[split]) / total
        assert 0.05 <= part < 0.06


def test_folder_holds_whole_files(tmp_path):
    files = {f"{i}.txt": bytes([i]) * 100 for i in range(40)}
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    splits = data.load_splits(tmp_path)
    seen = [set(split.tolist()) for split in splits.values()]
    assert [len(split) for split in splits.values()] == [3600, 200, 200]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 40


def test_default_text_is_the_standard_library():
    splits = data.load_splits()
    assert sum(map(len, splits.values())) > 5_000_000
    assert b"import" in bytes(splits["test"])


def test_file_is_cut_like_enwik8():
    text = bytes(range(100)) * 10
    splits = data.split_bytes(text)
    assert [len(split) for split in splits.values()] == [900, 50, 50]
    assert b"".join(splits.values()) == text
    # The usual split sizes, without the 100 million bytes.
    sizes = [len(split) for split in data.split_bytes(range(10**8)).values()]
    assert sizes == [90_000_000, 5_000_000, 5_000_000]


def test_batches_depend_on_seed_and_step_only():
    text = np.arange(200, dtype="uint8")
    first = data.batches(text, 16, 4, seed=3)
    skipped = [next(first) for _ in range(6)][5]
    inputs, targets = next(data.batches(text, 16, 4, seed=3, first_step=5))
    tokens = inputs["token_ids"]
    np.testing.assert_array_equal(tokens, skipped[0]["token_ids"])
    np.testing.assert_array_equal(tokens + 1, targets)
    other, _ = next(data.batches(text, 16, 4, seed=4, first_step=5))
    assert (other["token_ids"] != tokens).any()


@pytest.mark.parametrize("length", [1, 7, 8, 100])
def test_evaluation_scores_each_byte_once(length):
    text = np.arange(101, dtype="uint8")
    inputs, targets, weights = data.evaluation_windows(text, length)
    scored = targets[weights > 0].tolist()
    assert scored == list(range(1, 101))
    np.testing.assert_array_equal(inputs["token_ids"] + 1, targets)


def test_excerpts_are_spread_over_the_text():
    text = np.arange(250, dtype="uint8")
    assert data.excerpts(text, 40, length=9).tolist() == [
        *range(0, 10),
        *range(80, 90),
        *range(160, 170),
        *range(240, 250),
    ]
    # Too few bytes for two windows.
    assert data.excerpts(text, 40, length=99).tolist() == [
        *range(0, 100),
        *range(150, 250),
    ]
    assert data.excerpts(text, 250, length=9) is text


# Model.


def test_bits_per_byte_is_the_mean_of_minus_log2():
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(256), size=(2, 5)).astype("float32")
    targets = generator.integers(0, 256, size=(2, 5))
    weights = np.array([[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]], "float32")
    chosen = np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0]
    metric = BitsPerByte()
    metric.update_state(targets, np.log(probabilities) + 3.0, sample_weight=weights)
    expected = np.sum(-np.log2(chosen) * weights) / weights.sum()
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)
    uniform = BitsPerByte()
    uniform.update_state(targets, np.zeros((2, 5, 256)))
    assert float(uniform.result()) == pytest.approx(math.log2(256))


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "attention", ["performer:num_features=16,window=4,rotary_wavelength=100", "softmax"]
)
def test_sampling_takes_the_likeliest_byte_of_the_whole_text(attention):
    model = build_model(attention, layers=2, dim=16, heads=2)
    prompt = b"def attend(query, key):"
    sampled, speed = sample(model, prompt, count=6, temperature=0, seed=0)
    text = np.frombuffer(prompt + sampled, np.uint8)[None]
    logits = keras.ops.convert_to_numpy(model(data.model_inputs(text)))
    likeliest = logits[0, len(prompt) - 1 : -1].argmax(-1).astype("uint8")
    assert likeliest.tobytes() == sampled
    assert speed > 0


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "attention", ["retention", "gated-linear", "delta", "gated-delta", "kimi-delta"]
)
def test_layers_with_decays_and_the_delta_rule_train_by_name(attention):
    arguments = train_byte_lm.parse_arguments([*TINY, "--attention", attention])
    model = training.new_model(arguments)
    text = np.frombuffer(Path(TEXT).read_bytes(), np.uint8)
    batch = next(data.batches(text, arguments.length, arguments.batch, seed=0))
    (block,) = model.backbone.transformer_layers
    # Copies: JAX reuses the memory of the weights.
    before = [weight.copy() for weight in weights_of(block.attention)]
    # The first step of the warm-up has a learning rate of 0.
    history = model.fit(*batch, batch_size=arguments.batch, epochs=4, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < losses[1]
    for old, new in zip(before, weights_of(block.attention), strict=True):
        assert np.isfinite(new).all() and np.any(old != new)


@pytest.mark.any_backend
def test_equal_widths_give_models_the_parameters_of_the_largest():
    options = dict(layers=2, dim=32, heads=2, feed_forward=None, convolution=0)
    compared = ["gated-delta", "softmax:rotary_wavelength=100", "vq:num_codes=256"]
    widths = equal_widths(compared, options)
    counts = {}
    for attention in compared:
        model = build_model(attention, **{**options, "feed_forward": widths[attention]})
        weights = model.trainable_weights
        counts[attention] = sum(math.prod(weight.shape) for weight in weights)
    assert max(counts.values()) <= 1.02 * min(counts.values())
    assert min(widths.values()) == 4 * 32 < max(widths.values())


@pytest.mark.any_backend
@pytest.mark.parametrize("attention", ["linear", "softmax:rotary_wavelength=100"])
def test_the_model_has_no_positions_but_those_it_is_given(attention):
    """Without positions, earlier bytes in another order give the same."""

    def last_logits(text, **options):
        keras.utils.set_random_seed(0)
        model = build_model(attention, layers=1, dim=16, heads=2, **options)
        rows = np.frombuffer(text, np.uint8)[None]
        return keras.ops.convert_to_numpy(model(data.model_inputs(rows)))[0, -1]

    plain, other = last_logits(b"abcdefgh"), last_logits(b"gfedcbah")
    close = np.allclose(plain, other, atol=1e-5)
    assert close == (attention == "linear")
    one, other = (last_logits(text, convolution=3) for text in (b"abcd", b"bacd"))
    assert not np.allclose(one, other, atol=1e-5)


# Runs.


def test_run_leaves_model_curve_plot_and_result(finished, trained):
    with open(finished / "curve.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(4, STEPS + 1, 4))
    assert float(rows[-1]["bits_per_byte"]) < float(rows[0]["bits_per_byte"]) < 9
    assert image.imread(finished / "curve.png").ndim == 3
    result = json.loads((finished / "result.json").read_text())
    assert {"gzip", "xz"} <= set(result)
    assert result["parameters"] == sum(
        math.prod(weight.shape) for weight in trained.weights
    )
    assert result["sampled_bytes_per_second"] > 0
    assert Checkpoints(finished).steps() == [STEPS, STEPS - 4]
    assert trained(data.model_inputs(np.zeros((1, 100)))).shape == (1, 100, 256)


@pytest.mark.parametrize("multiple", training.MULTIPLES)
def test_the_result_has_the_bits_of_windows_of_each_length(finished, trained, multiple):
    """Against a mean over all bytes, each window called alone."""
    result = json.loads((finished / "result.json").read_text())
    text = Path(TEXT).read_bytes()
    test = np.frombuffer(text[len(text) - len(text) // 20 :], np.uint8)
    assert result["test_bytes"] == len(test)
    length = multiple * 32
    nats, scored = 0.0, 1
    while scored < len(test):
        start = max(0, min(scored - 1 - length // 2, len(test) - 1 - length))
        if scored == 1:
            start = 0
        window = test[start : start + length + 1]
        logits = trained(data.model_inputs(window[None, :-1]))
        logits = keras.ops.convert_to_numpy(logits)[0].astype("float64")
        chosen = logits[np.arange(length), window[1:]]
        losses = np.log(np.exp(logits).sum(-1)) - chosen
        nats += losses[scored - start - 1 :].sum()
        scored = start + length + 1
    bits = nats / (len(test) - 1) / math.log(2)
    assert result["bits_per_byte"][str(length)] == pytest.approx(bits, rel=1e-4)


def test_killed_run_resumes_from_its_last_whole_checkpoint(
    trained, tmp_path, capsys, short_training_is_not_traced
):
    """Reaches the same weights, and reports the damaged checkpoint."""
    script = train_byte_lm.__file__
    command = [sys.executable, script, *TINY, "--out", str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (tmp_path / "checkpoint-8.json").exists():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    newest, before = Checkpoints(tmp_path).steps()
    assert newest < STEPS
    damaged = tmp_path / f"checkpoint-{newest}.keras"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with short_training_is_not_traced():
        assert train_byte_lm.main([*TINY, "--out", str(tmp_path), "--resume"]) == 0
    printed = capsys.readouterr().out
    assert f"{damaged} is damaged" in printed
    assert f"Going on from step {before} of {STEPS}" in printed
    assert_same_weights(tmp_path, trained)


def test_the_newest_checkpoint_comes_back(finished, trained):
    model, record = Checkpoints(finished).restore()
    assert record["step"] == STEPS
    for weight, other in zip(weights_of(model), weights_of(trained), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_no_whole_checkpoint_is_an_error(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "copy")
    for path in out.glob("checkpoint-*.keras"):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="all checkpoints in .* are damaged"):
        Checkpoints(out).restore()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--attention", "nothing"], "identifier='nothing'"),
        (["--attention", "performer:widow=3"], "no option 'widow'; choose from"),
        (["--attention", "performer:feature_map=cosine"], "'cosine'"),
        (["--attention", "performer:feature_map=favor++"], "has no causal form"),
        (["--attention", "reformer:aligned=False"], "--attention"),
        (["--out", TEXT], "File exists"),
        (["--dim", "16", "--heads", "3"], "--dim 16 --heads 3"),
        (["--length", "90000"], "--length 90000 is too long: the train text has"),
        (["--length", "60"], "--length 60 is too long: the test text has"),
        (["--convolution", "-1"], "not negative; received '-1'"),
        (["--convolution", "1"], "at least 2; received 1"),
        (["--feed-forward", "0"], "positive integer; received '0'"),
        (["--steps", "0"], "positive integer; received '0'"),
        (["--learning-rate", "fast"], "positive number; received 'fast'"),
        (["--text", "no/such/file"], "no such file or folder"),
        (["--text", "EMPTY"], "too little text"),
        (["--dtype", "int7"], "invalid choice: 'int7'"),
        (["--unknown"], "--unknown"),
        (["--compare", "softmax", "nothing"], "identifier='nothing'"),
        (["--compare", "softmax", "softmax"], "--compare has softmax twice"),
    ],
)
def test_bad_arguments_get_one_line(options, message, tmp_path, error_line):
    empty = tmp_path / "empty"
    empty.touch()
    options = [str(empty) if option == "EMPTY" else option for option in options]
    arguments = [*TINY, "--out", str(tmp_path / "out"), *options]
    assert message in error_line(train_byte_lm, arguments)
    assert not (tmp_path / "out").exists()


def test_used_folder_and_other_arguments_are_refused(finished, capsys):
    assert train_byte_lm.main([*TINY, "--out", str(finished)]) == 2
    assert "holds a run of 24 steps: continue it with --resume" in (
        capsys.readouterr().err
    )
    changed = [*TINY, "--out", str(finished), "--resume", "--dim", "32"]
    assert train_byte_lm.main(changed) == 2
    error = capsys.readouterr().err
    assert "--dim must be as in the run in --out, 16; received 32" in error
    assert error.count("\n") == 1


@pytest.mark.any_backend
def test_compare_prints_a_row_for_each(tmp_path, capsys, monkeypatch):
    def run(command):
        """Runs the command in this process; killed runs test it as a script."""
        python, script, *arguments = command
        assert (python, script) == (sys.executable, train_byte_lm.__file__)
        return subprocess.CompletedProcess(command, train_byte_lm.main(arguments))

    monkeypatch.setattr(train_byte_lm.subprocess, "run", run)
    options = [*TINY, "--steps", "2", "--convolution", "2", "--out", str(tmp_path)]
    compared = ["softmax:rotary_wavelength=100", "adaptive-span:max_span=16"]
    assert train_byte_lm.main([*options, "--compare", *compared]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| attention "))
    parameters = []
    for attention, line in zip(compared, lines[header + 2 : header + 4], strict=True):
        name, *numbers = line.strip("| ").split(" | ")
        assert name == attention
        numbers = [float(number.replace(",", "")) for number in numbers]
        assert len(numbers) == 6 and all(number > 0 for number in numbers)
        parameters.append(numbers[0])
    assert max(parameters) <= 1.02 * min(parameters)
    assert image.imread(tmp_path / "curves.png").ndim == 3
    (result,) = tmp_path.glob("2-*/result.json")
    assert np.shape(json.loads(result.read_text())["spans"]) == (1, 2)
    assert (result.parent / "spans.png").stat().st_size > 0
