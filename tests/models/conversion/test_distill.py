"""Distillation, compared with errors of public outputs and of `swap_report`."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import convert_backbone, distill, swap_report
from tests.models.conversion import families
from tests.saving import saved_and_loaded

LEARNED = "performer:feature_map=learned,num_features=4,window=2"
# So small that the weights hardly change: the loss is that of the initial models.
STILL = dict(transfer_learning_rate=1e-9, learning_rate=1e-9, verbose=0)


def losses(teacher, student, data, **options):
    histories = distill(teacher, student, data, **options)
    return {name: history.history["loss"] for name, history in histories.items()}


def learned_weights(model):
    layers = families.efficient_layers(model)
    return [ops.convert_to_numpy(w) for k in layers for w in k.trainable_weights]


def output_error(teacher, student, data):
    return families.output_error(student, teacher, data) ** 2


def test_losses_are_the_errors_of_layers_and_of_hidden_states():
    teacher = families.make("distil_bert")
    student = convert_backbone(teacher, LEARNED)
    data = families.inputs(teacher)
    report = swap_report(teacher, student, data).layers
    output = output_error(teacher, student, data)
    found = losses(teacher, student, data, window_dropout=0, **STILL)
    attention = np.mean([layer.attention**2 for layer in report])
    assert found["transfer"] == pytest.approx([attention], rel=1e-3)
    hidden = np.mean([layer.residual**2 for layer in report])
    assert found["states"] == pytest.approx([hidden + output], rel=1e-3)


def test_a_task_learns_the_divergence_of_its_logits():
    def task(backbone):
        return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)

    backbone = families.make("llama")
    data = families.inputs(backbone)
    converted = convert_backbone(backbone, LEARNED)
    report = swap_report(backbone, converted, data).layers
    teacher, student = task(backbone), task(converted)
    kept = data["padding_mask"] > 0
    old, new = (
        ops.convert_to_numpy(ops.log_softmax(model(data)))[kept].astype("float64")
        for model in (teacher, student)
    )
    divergence = np.mean(np.sum(np.exp(old) * (old - new), axis=-1))
    found = losses(teacher, student, data, transfer_epochs=0, window_dropout=0, **STILL)
    hidden = np.mean([layer.residual**2 for layer in report])
    assert found == {"states": pytest.approx([hidden + divergence], rel=1e-3)}


def test_a_dropped_window_leaves_the_estimate_of_all_keys():
    teacher = families.make("distil_bert")
    data = families.inputs(teacher)
    student = convert_backbone(teacher, LEARNED)
    alone = convert_backbone(teacher, LEARNED.replace(",window=2", ""))
    for ours, theirs in zip(
        families.efficient_layers(alone),
        families.efficient_layers(student),
        strict=True,
    ):
        ours.set_weights(theirs.get_weights())
    report = swap_report(teacher, alone, data).layers
    expected = np.mean([layer.attention**2 for layer in report])
    # The first step uses the given rate.
    found = losses(teacher, student, data, epochs=0, window_dropout=1, **STILL)
    assert found == {"transfer": pytest.approx([expected], rel=1e-3)}
    assert [layer.window for layer in families.efficient_layers(student)] == [2, 2]


@pytest.mark.any_backend
def test_a_window_of_codes_is_not_dropped():
    teacher = families.make("distil_bert")
    data = families.inputs(teacher)
    options = "vq:num_codes=3,window=2,quantize_window=True"
    student = convert_backbone(teacher, options, calibrate=data)
    report = swap_report(teacher, student, data)
    hidden = np.mean([layer.residual**2 for layer in report.layers])
    expected = hidden + output_error(teacher, student, data)
    assert expected > 1e-3
    found = losses(teacher, student, data, **STILL)
    assert found["states"] == pytest.approx([expected], rel=1e-3)
    assert [error.path for error in report.paths] == ["as it is"]


def test_stages_train_what_they_should(tmp_path):
    teacher = families.make("distil_bert")
    data = [families.inputs(teacher, seed) for seed in range(3)]
    student = convert_backbone(teacher, LEARNED)
    before = [np.array(w) for w in teacher.get_weights()]
    report = swap_report(teacher, student, data[0]).layers
    first_weights = learned_weights(student)
    first_error = output_error(teacher, student, data[0])
    distill(teacher, student, data, transfer_epochs=15, epochs=0, verbose=0)
    for old, new in zip(
        report, swap_report(teacher, student, data[0]).layers, strict=True
    ):
        assert new.attention < 0.9 * old.attention
    moved = zip(first_weights, learned_weights(student), strict=True)
    assert all(np.max(abs(new - old)) > 1e-3 for old, new in moved)
    # All other weights are unchanged: without the new layers, it is the teacher.
    exact = convert_backbone(teacher, families.LOCAL)
    for weight, same in zip(exact.weights, teacher.weights, strict=True):
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (weight, same)))
    paths = {w.path: ops.convert_to_numpy(w) for w in teacher.weights}
    shared = [w for w in student.weights if w.path in paths]
    assert len(shared) == len(paths)
    for weight in shared:
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), paths[weight.path])

    transferred = output_error(teacher, student, data[0])
    found = losses(
        teacher, student, data, transfer_epochs=0, epochs=15, lora_rank=2, verbose=0
    )
    assert found["states"][-1] < found["states"][0]
    assert output_error(teacher, student, data[0]) < transferred < first_error
    assert {w.path for w in student.trainable_weights if "lora" in w.path}
    for old, new in zip(before, teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    loaded = saved_and_loaded(student, tmp_path)
    families.assert_same_outputs(student, loaded, data[0])


def test_all_weights_and_mixed_precision():
    with_policy = families.make("distil_bert", dtype="mixed_bfloat16", num_layers=1)
    data = families.inputs(with_policy)
    student = convert_backbone(with_policy, "local:window=2")
    before = [np.array(w) for w in student.get_weights()]
    # Layers without their own weights have nothing to transfer.
    found = losses(with_policy, student, data, epochs=4, lora_rank=None, verbose=0)
    assert list(found) == ["states"]
    assert found["states"][-1] < found["states"][0]
    after = student.get_weights()
    moved = [np.max(abs(new - old)) > 0 for old, new in zip(before, after, strict=True)]
    # Key biases have no effect under a softmax; neither have unused positions.
    assert sum(moved) > len(moved) - 2


class Interruption(keras.callbacks.Callback):
    """Interrupts a run in an epoch of the second stage."""

    def on_epoch_begin(self, epoch, logs=None):
        if type(self.model).__name__ == "StateDistillation" and epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.any_backend
@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, kind):
    teacher = families.make("distil_bert", num_layers=1)
    data = [families.inputs(teacher, seed) for seed in range(4)]
    options = dict(transfer_epochs=2, epochs=3, lora_rank=2, verbose=0)
    if kind == "generator":
        options["steps_per_epoch"] = 3

    def run(folder, callbacks=None):
        keras.utils.set_random_seed(7)
        student = convert_backbone(teacher, LEARNED)
        generator = ((batch,) for batch in itertools.cycle(data))
        histories = distill(
            teacher,
            student,
            data if kind == "list" else generator,
            backup_dir=folder,
            callbacks=callbacks,
            **options,
        )
        return student, histories

    expected, _ = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [Interruption()])
    student, histories = run(tmp_path)
    assert [len(h.epoch) for h in histories.values()] == [0, 2]
    families.assert_same_outputs(expected, student, data[0])


@pytest.mark.any_backend
def test_a_checkpoint_is_whole_or_named(tmp_path, monkeypatch):
    teacher = families.make("distil_bert", num_layers=1)
    data = families.inputs(teacher)
    student = convert_backbone(teacher, LEARNED)
    options = dict(transfer_epochs=0, lora_rank=2, backup_dir=tmp_path, verbose=0)
    distill(teacher, student, data, epochs=1, **options)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()

    def kill(file, *arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", kill)
        with pytest.raises(KeyboardInterrupt):
            distill(teacher, student, data, epochs=2, **options)
    assert path.read_bytes() == whole
    history = distill(teacher, student, data, epochs=2, **options)["states"]
    assert history.epoch == [1]

    for content in (whole[:100], whole[: len(whole) // 2] + whole[-90:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"damaged.*{path.name}"):
            distill(teacher, student, data, epochs=2, **options)
    path.write_bytes(whole)
    other = convert_backbone(
        teacher, LEARNED.replace("num_features=4", "num_features=6")
    )
    with pytest.raises(ValueError, match="another student"):
        distill(teacher, other, data, epochs=2, **options)


@pytest.mark.any_backend
def test_a_tuple_is_one_batch_with_targets():
    teacher = families.make("distil_bert", num_layers=1)
    batch = families.inputs(teacher)
    found = []
    for data in (batch, (batch, np.zeros(2)), [(batch, np.zeros(2))]):
        student = convert_backbone(teacher, "local:window=2")
        histories = distill(teacher, student, data, verbose=0)
        found.append(histories["states"].history["loss"])
    assert found[1:] == [found[0]] * 2
    with pytest.raises(ValueError, match="`data` must hold at least one batch"):
        distill(teacher, student, [])


def test_with_lora_neither_heads_nor_biases_train():
    backbone = families.make("distil_bert", num_layers=1)
    teacher, student = (
        keras_hub.models.DistilBertTextClassifier(
            model, num_classes=3, preprocessor=None
        )
        for model in (backbone, convert_backbone(backbone, LEARNED))
    )
    data = families.inputs(backbone)
    before = {w.path: ops.convert_to_numpy(w) for w in student.weights}
    distill(teacher, student, data, epochs=3, lora_rank=2, verbose=0)
    own = {
        w.path for k in families.efficient_layers(student) for w in k.trainable_weights
    }
    still = [w for w in student.weights if w.path in before and w.path not in own]
    assert {"logits/kernel", "logits/bias"} <= {
        "/".join(w.path.split("/")[-2:]) for w in still
    }
    for weight in still:
        # Merged LoRA is no part of an efficient layer.
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), before[weight.path])
    factors = [w for w in student.trainable_weights if "lora_kernel_b" in w.path]
    assert len(factors) == 4
    assert all(np.max(abs(ops.convert_to_numpy(w))) > 0 for w in factors)


@pytest.mark.parametrize("lengths", [(7, 5), (6, 6)])
def test_an_encoder_decoder_counts_each_output_by_its_own_padding(lengths):
    teacher = families.make("bart")
    student = convert_backbone(teacher, "local:window=2")
    random_ids = np.random.default_rng(0)
    data = {}
    for side, length, kept in zip(("encoder", "decoder"), lengths, (3, 4), strict=True):
        ids = random_ids.integers(1, 50, (2, length)).astype("int32")
        data[f"{side}_token_ids"] = ids
        data[f"{side}_padding_mask"] = np.ones_like(ids)
        data[f"{side}_padding_mask"][0, kept:] = 0
    report = swap_report(teacher, student, data).layers
    outputs = [
        families.relative_error(new, old) ** 2
        for old, new in zip(
            families.outputs(teacher, data),
            families.outputs(student, data),
            strict=True,
        )
    ]
    options = dict(transfer_epochs=0, window_dropout=0, **STILL)
    found = losses(teacher, student, data, **options)["states"]
    hidden = np.mean([layer.residual**2 for layer in report])
    assert found == pytest.approx([hidden + np.mean(outputs)], rel=1e-3)


@pytest.mark.any_backend
def test_refusals():
    teacher = families.make("distil_bert", num_layers=1)
    data = families.inputs(teacher)
    student = convert_backbone(teacher, LEARNED)
    other = families.make("distil_bert", num_layers=2)
    for arguments, options, message in (
        ((teacher, teacher, data), {}, "must come from `convert_backbone`"),
        ((other, student, data), {}, "2 and 1"),
        ((teacher, student, data), dict(epochs=-1), "epochs=-1"),
        ((teacher, student, data), dict(lora_rank=0), "lora_rank=0"),
        ((teacher, student, data), dict(window_dropout=2), "window_dropout=2"),
        ((teacher, student, data), dict(learning_rate=-1.0), "learning_rate=-1.0"),
        ((teacher, student, iter([data])), {}, "steps_per_epoch=None"),
        ((teacher, student, [data]), dict(steps_per_epoch=2), "2, 1 batches"),
        ((teacher, student, [data]), dict(steps_per_epoch=0), "steps_per_epoch=0"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(*arguments, **options)
    with pytest.raises(TypeError, match="student=3"):
        distill(teacher, 3, data)
    classifier = keras_hub.models.DistilBertTextClassifier(
        teacher, num_classes=2, preprocessor=None
    )
    with pytest.raises(ValueError, match="both tasks"):
        distill(classifier, student, data)
