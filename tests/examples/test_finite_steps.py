"""Steps with NaN, compared with training on the other batches only."""

import keras
import numpy as np
import pytest

import train_byte_lm
from byte_lm import data
from byte_lm.checkpoints import Checkpoints
from byte_lm.finite_steps import keep_finite

TINY = (
    "--length 8 --layers 1 --dim 8 --heads 1 --batch 1 --steps 4 "
    "--epoch-steps 2 --sample-bytes 1 --test-bytes 20 --attention linear --text"
).split()


def fit(batches):
    """Variables after training, and the losses of the steps."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.5, seed=1)])
    model.compile("adam", "mse", metrics=["mae"])
    model.build((None, 3))
    model.optimizer.build(model.trainable_variables)
    keep_finite(model)
    losses = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
    )
    stream = (batch for batch in batches)
    history = model.fit(
        stream, steps_per_epoch=len(batches), verbose=0, callbacks=[keep]
    )
    variables = [*model.variables, *model.optimizer.variables]
    assert int(model.optimizer.iterations) == np.isfinite(losses).sum()
    arrays = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return arrays, losses, history.history["mae"]


def test_a_step_that_gives_nan_changes_nothing():
    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(2, 3)).astype("float32"), np.zeros((2, 5), "float32"))
        for _ in range(5)
    ]
    expected, _, error = fit([batches[0], batches[2], batches[4]])
    batches[1][0][0, 1] = np.nan
    # The variance overflows.
    batches[3][0][:] *= 1e30
    received, losses, other_error = fit(batches)
    assert np.isnan(losses).tolist() == [False, True, False, True, False]
    assert error == other_error
    for value, other in zip(received, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script's exit status, where the third batch has a weight of NaN."""
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(300)))
    batches = data.batches

    def with_nan(*arguments, first_step):
        found = batches(*arguments, first_step=first_step)
        for step, (inputs, targets) in enumerate(found, start=first_step + 1):
            weights = np.ones(targets.shape, "float32")
            weights[0, -1] = np.nan if step == 3 else 1.0
            yield inputs, targets, weights

    monkeypatch.setattr(data, "batches", with_nan)
    out = tmp_path / "out"

    def run(*options):
        return train_byte_lm.main([*TINY, str(text), "--out", str(out), *options])

    run.out = out
    return run


@pytest.mark.any_backend
def test_the_script_stops_or_skips_and_names_the_step(script, capsys):
    assert script() == 2
    error = capsys.readouterr().err
    assert "step 3 gave NaN" in error and "go on from step 2" in error
    assert Checkpoints(script.out).steps() == [2]
    assert script("--resume", "--on-nan", "skip") == 0
    assert "Step 3 gave NaN" in capsys.readouterr().out
    model, record = Checkpoints(script.out).restore()
    assert (record["step"], record["skipped"]) == (4, [3])
    assert int(model.optimizer.iterations) == 3
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
