import json
import re

import numpy as np
import pytest

import universal_transformer
from algorithms.data import END, FIRST, PLUS, START, examples, model_inputs
from algorithms.training import build_model, learning_rate_schedule
from keras_efficient_attn.models import PositionOptions
from keras_efficient_attn.models.files import FOLDER

pytestmark = pytest.mark.any_backend


def number(digits):
    return int("".join(str(digit - FIRST) for digit in digits[::-1]))


def test_targets_belong_to_their_sources():
    for task in ("copy", "reverse", "addition"):
        sources, targets = examples(task, 50, (3, 9), 10, seed=0)
        for source, target in zip(sources, targets, strict=True):
            if task == "addition":
                middle = list(source).index(PLUS)
                total = number(source[:middle]) + number(source[middle + 1 :])
                assert number(target) == total
            else:
                step = 1 if task == "copy" else -1
                np.testing.assert_array_equal(target, source[::step])
        assert {len(source) for source in sources} <= set(range(3, 10))


def test_the_decoder_is_shown_what_came_before():
    inputs, y, weights = model_inputs([[5, 6], [7]], [[6, 5], [7]])
    np.testing.assert_array_equal(
        inputs["decoder_token_ids"], [[START, 6, 5], [START, 7, 0]]
    )
    np.testing.assert_array_equal(y, [[6, 5, END], [7, END, 0]])
    np.testing.assert_array_equal(weights, [[1, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(inputs["encoder_padding_mask"], [[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("vanilla", "transformer_base"),
        ("universal", "universal_transformer_base"),
        ("adaptive", "adaptive_universal_transformer_base"),
    ],
)
def test_models_have_the_form_of_their_papers(kind, preset):
    options = "--dim 8 --heads 2 --form paper".split()
    arguments = universal_transformer.parse_arguments(options)
    ours = build_model(kind, "copy", arguments).backbone.get_config()
    text = (FOLDER / preset / "config.json").read_text(encoding="utf-8")
    paper = json.loads(text)["config"]
    assert ours["residual"]["kind"] == paper["residual"]
    assert ours["embedding"]["scale"] == paper["embedding"]["scale"]
    assert ours["feed_forward"]["activation"] == paper["feed_forward"]
    positions = PositionOptions.get("positions", paper["positions"])
    # Random offsets need the positions in each layer.
    expected = {**positions.get_config(), "max_offset": 16, "each_layer": True}
    assert ours["positions"] == expected
    usual = universal_transformer.parse_arguments(options[:-2])
    usual = build_model(kind, "copy", usual).backbone.get_config()
    assert usual["residual"]["kind"] == "pre_norm"
    recurrence = paper.get("recurrence", {})
    timesteps = ours["recurrence"]["timestep_embedding"]
    assert timesteps == recurrence.get("timestep_embedding")


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rate_rises_in_a_warm_up_and_falls_to_zero(warmup):
    options = f"--steps 9 --learning-rate 0.5 --warmup {warmup}".split()
    schedule = learning_rate_schedule(universal_transformer.parse_arguments(options))
    steps = np.arange(10)
    fall = 0.25 + 0.25 * np.cos(np.pi * (steps - warmup) / (9 - warmup))
    rise = 0.5 * steps / max(1, warmup)
    expected = np.where(steps < warmup, rise, fall)
    rates = [float(schedule(step)) for step in steps]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_the_script_prints_its_table(printed_table):
    arguments = (
        "--tasks copy --models vanilla adaptive --train-length 3 --test-lengths 3 5 "
        "--alphabet 3 --depth 1 --dim 16 --heads 2 --steps 2 --batch 2 "
        "--test-sequences 4 --verbose 0 --warmup 1 --seeds 0 1"
    )
    assert universal_transformer.main(arguments.split()) == 0
    header, vanilla, adaptive = printed_table()
    assert header[-3:] == ["length 3", "length 5", "paper, 400"]
    assert vanilla[:2] == ["copy", "vanilla"] and vanilla[-1] == "0.53/0.03"
    assert adaptive[1] == "adaptive" and vanilla[3] == "1"
    assert adaptive[3] == "1/1"
    share = r"\d\.\d\d ± \d\.\d\d"
    assert re.fullmatch(f"{share}/{share}", vanilla[-2])


@pytest.mark.parametrize(
    "arguments",
    ["--steps 0", "--dim 6", "--test-lengths 2", "--attention nothing"],
)
def test_wrong_arguments_are_one_line(arguments, error_line):
    assert error_line(universal_transformer, arguments.split())
