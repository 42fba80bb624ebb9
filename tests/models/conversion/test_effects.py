"""The effect of replacing single layers on the output of a model."""

import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import convert_backbone
from keras_efficient_attn.models.conversion.backbone import apply_plan
from keras_efficient_attn.models.conversion.layer_search import output_effect
from keras_efficient_attn.models.conversion.plan import plan_conversion
from keras_efficient_attn.models.conversion.trace import trace
from keras_efficient_attn.models.conversion.window_search import choose_windows
from tests.models.conversion import families

pytestmark = pytest.mark.any_backend
NEAR = "local:window=2"


def measure(backbone, data):
    plan = plan_conversion(backbone, NEAR)
    return output_effect(plan, apply_plan(plan), data)


def test_of_a_causal_model_it_is_the_divergence_of_logits():
    backbone = families.make("llama")
    data = [families.inputs(backbone, seed) for seed in range(2)]
    effect = measure(backbone, data)
    for layers in ([0], [1], [0, 1]):
        models = backbone, convert_backbone(backbone, NEAR, layers)
        tasks = [keras_hub.models.LlamaCausalLM(m, preprocessor=None) for m in models]
        expected = []
        for batch in data:
            kept = batch["padding_mask"] > 0
            old, new = (
                ops.convert_to_numpy(ops.log_softmax(task(batch)))[kept]
                for task in tasks
            )
            expected.append(np.mean(np.sum(np.exp(old) * (old - new), axis=-1)))
        assert np.mean(expected) > 1e-3
        assert effect(layers) == pytest.approx(np.mean(expected), rel=1e-3)


def test_of_an_encoder_it_is_the_error_of_mean_states():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    effect = measure(backbone, [data])
    kept = data["padding_mask"] > 0
    for layers in ([0], [1]):
        models = backbone, convert_backbone(backbone, NEAR, layers)
        old, new = (
            [row[mask].mean(0) for row, mask in zip(states, kept, strict=True)]
            for states in (ops.convert_to_numpy(model(data)) for model in models)
        )
        error = np.linalg.norm(np.subtract(new, old)) / np.linalg.norm(old)
        assert error > 0.01
        assert effect(layers) == pytest.approx(error, rel=1e-4)


def test_windows_by_another_error():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone, padded=False)
    plan = plan_conversion(backbone, "local:window=1")
    adapters = apply_plan(plan).attention_adapters
    records = trace(backbone, plan.chosen_sites, [data])
    # The second layer is the only one that counts.
    errors = {1: 4.0, 2: 3.0, 4: 1.0, 8: 1.0}

    def effect(layers):
        (index,) = layers
        return index * errors[adapters[index].kernel.window]

    assert choose_windows(3, adapters, plan.chosen_sites, records, effect) == [1, 4]
    assert [adapter.kernel.window for adapter in adapters] == [1, 4]
