"""The verdict's suite: its tasks, runs at tiny sizes, and the page's table."""

import json
import math
import re

import keras
import numpy as np
import pytest

import folders
import verdict_page
import verdict_run
from keras_efficient_attn.benchmark import Comparison, Record
from keras_efficient_attn.benchmark.report import write_json
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.layers.attention.registry import attention_class
from keras_efficient_attn.models import EfficientTransformerBackbone
from tests.autodiff import to_numpy
from tests.registered import own_attention_names
from verdict import both_ways, cost, depth, language, listops, models
from verdict.candidates import CANDIDATES, PARTS
from verdict.runs import Runs

pytestmark = pytest.mark.any_backend

SIZES = {"layers": 1, "heads": 2, "dim": 8}
TEXT = (
    "layers=1 heads=2 dim=8 steps=2 batch=2 length=16 lengths=[16,32] scored=4 "
    "windows=2"
)
TINY = {
    "language": TEXT,
    "depth": TEXT,
    "both_ways": (
        "layers=1 heads=2 dim=8 steps=2 batch=2 length=24 lengths=[24,48] windows=2"
    ),
    "recall": (
        "dim=8 steps=2 batch=2 test_sequences=2 recall={'task':'recall','pairs':[1],"
        "'writes':1,'vocabulary':16,'length':8} long_recall={'task':'recall',"
        "'pairs':[1],'writes':1,'vocabulary':16,'length':16}"
    ),
    "listops": "layers=1 heads=2 dim=8 steps=2 batch=2 length=20 test_rows=3",
    "classes": (
        "layers=1 heads=2 dim=8 steps=2 batch=2 classes=2 length=32 test_windows=2"
    ),
}


def names_of(attention):
    specs = attention if isinstance(attention, list) else [attention or ""]
    return {spec.partition(":")[0] for spec in specs} - {""}


def test_every_registered_layer_is_a_candidate():
    names = set()
    for candidate in CANDIDATES.values():
        names |= names_of(candidate.attention) | names_of(candidate.without)
    assert names == set(own_attention_names())


@pytest.mark.parametrize("name", CANDIDATES)
def test_models_have_every_layer_of_a_candidate(name):
    candidate = CANDIDATES[name]
    deep = candidate.parts == ("depth",)
    layers = (depth if deep else language).SIZES["layers"]
    sizes = {"layers": layers, "heads": 2, "dim": 64}
    for convolution, attention in (
        (True, candidate.attention),
        (False, candidate.without or candidate.attention),
    ):
        options = candidate.options(convolution)
        model = models.backbone(options, sizes, 256, "decoder", seed=0)
        kinds = {type(block.attention) for block in model.transformer_layers}
        assert kinds == {attention_class(each) for each in names_of(attention)}


@pytest.mark.parametrize(
    ("name", "positions"),
    [("linear", "rotary"), ("reformer", "sinusoidal"), ("fourier", "sinusoidal")],
)
def test_a_convolution_gives_causal_models_the_order(name, positions):
    candidate = CANDIDATES[name]
    assert candidate.options(True)["positions"] is None
    # Sinusoids do not improve masked models.
    kept = None if positions == "sinusoidal" else positions
    assert candidate.options(True, both_ways=True)["positions"] == kept
    assert candidate.options(False)["positions"] == positions


@pytest.mark.parametrize(
    "architecture, name", [("decoder", "gated-delta"), ("encoder", "local")]
)
def test_defaults_are_what_was_measured(architecture, name):
    both_ways = architecture == "encoder"
    sizes = {
        "vocabulary_size": 9,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 4,
        "intermediate_dim": 4,
        "architecture": architecture,
    }
    measured = CANDIDATES[name].options(convolution=True, both_ways=both_ways)
    blocks = [
        EfficientTransformerBackbone(**sizes, **options).transformer_layers[0]
        for options in ({}, measured)
    ]
    for part in ("attention", "convolution"):
        default, wanted = (
            layer and {**layer.get_config(), "name": None}
            for layer in (getattr(block, part) for block in blocks)
        )
        assert default == wanted


def test_codes_have_the_positions_of_their_paper():
    for convolution in (True, False):
        options = CANDIDATES["vq"].options(convolution)
        assert options["positions"] is None
        model = models.backbone(options, SIZES, 256, "decoder", seed=0)
        for block in model.transformer_layers:
            assert block.attention.config.relative_positions


def test_softmax_has_rotary_positions_or_none():
    names = {"softmax": "rotary", "softmax, no positions": None}
    for name, positions in names.items():
        for convolution in (True, False):
            assert CANDIDATES[name].options(convolution)["positions"] == positions
    # Models of recall have none: it would be the same model twice.
    assert "recall" not in CANDIDATES["softmax, no positions"].parts


@pytest.mark.parametrize("name", CANDIDATES)
def test_models_have_as_many_weights_as_softmax(name):
    sizes = {"layers": 1, "heads": 4, "dim": 128}
    options = CANDIDATES[name].options(True)
    model = models.backbone(options, sizes, 256, "decoder", seed=0)
    # Embedding, four projections and a network of 512 with biases, and three norms.
    count = 256 * 128 + 4 * 128 * 129 + 2 * 128 * 512 + 640 + 3 * 256
    own = sum(np.prod(x.shape) for x in model.trainable_weights)
    assert own == pytest.approx(count, rel=0.005)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("language", ["gated-delta", "local"]),
        ("both_ways", ["gated-delta", "linear"]),
        ("recall", ["delta", "linear, local in turn"]),
        ("depth", ["softmax", "linear"]),
        ("listops", ["softmax"]),
        ("classes", ["softmax"]),
    ],
)
def test_a_part_runs_what_is_missing(part, names, tmp_path, capsys, monkeypatch):
    arguments = [part, "--candidates", *names, "--seeds", "3", "--out", str(tmp_path)]
    arguments += ["--convolution", "with", "--sizes", *TINY[part].split()]
    assert verdict_run.main(arguments) == 0
    records = [json.loads(x.read_text()) for x in (tmp_path / part).iterdir()]
    # Layers that are causal only have no masked model, and one block is no hybrid.
    left_out = {
        "both_ways": "gated-delta",
        "recall": "linear, local in turn",
        "depth": "linear",
    }
    expected = [name for name in names if name != left_out.get(part)]
    assert sorted(record["candidate"] for record in records) == sorted(expected)
    for record in records:
        assert record["seed"] == 3 and record["convolution"]
        assert record["sizes"]["dim"] == 8
        assert {"backend", "keras", "cpu"} <= record["environment"].keys()
    printed = capsys.readouterr().out
    monkeypatch.setattr(f"verdict.{part}.measure", None)
    assert verdict_run.main(arguments) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("word", "said"), [("step=3", "steps"), ("steps=a", "int"), ("lengths=3", "list")]
)
def test_wrong_sizes_are_one_line(word, said, error_line, tmp_path):
    arguments = ["language", "--out", str(tmp_path), "--sizes", word]
    assert said in error_line(verdict_run, arguments)


def test_other_options_are_another_run(tmp_path):
    runs = Runs(tmp_path, "language", {"dim": 8})

    def run(**options):
        return runs.run("linear", True, 0, options, lambda own, *_: own)["result"]

    assert run(positions=None) == {"positions": None}
    assert run(positions="rotary") == {"positions": "rotary"}
    assert len(list(tmp_path.glob("*/*.json"))) == 2


def test_listops_have_the_value_of_their_lists():
    words = [*map(str, range(10)), "min(", "max(", "med(", "sm(", ")"]
    functions = {
        "min": lambda *x: min(x),
        "max": lambda *x: max(x),
        "med": lambda *x: int(sorted(x)[len(x) // 2]),
        "sm": lambda *x: sum(x) % 10,
    }
    random = np.random.default_rng(0)
    lengths = []
    for length in [1, 3, 4, 5, 30, *[300] * 20]:
        tokens, values = listops.expression(random, length)
        assert len(tokens) == len(values) <= length
        for end, token in enumerate(tokens):
            if token not in listops.OPERATORS:
                text = "".join(
                    word if word.endswith("(") else word + ","
                    for word in (words[x] for x in listed(tokens[: end + 1]))
                )
                assert eval(text.rstrip(","), functions) == values[end]
        lengths.append(len(tokens))
    # Most of the length is used.
    assert np.mean(lengths[5:]) > 150


def listed(tokens):
    """The tokens of the list, or the digit, that ends with the last one."""
    depth = 0
    for start in reversed(range(len(tokens))):
        depth += (tokens[start] == listops.CLOSE) - (tokens[start] in listops.OPERATORS)
        if depth == 0:
            return tokens[start:]
    raise ValueError(f"The list does not begin: {tokens}")


def test_values_count_where_a_list_closes():
    inputs, values, closes = listops.rows(np.random.default_rng(0), 3, 40)
    tokens = inputs["token_ids"]
    used = inputs["padding_mask"].sum(1)
    assert ((tokens != listops.PADDING).sum(1) == used).all()
    assert ((0 <= values) & (values < 10)).all()
    np.testing.assert_array_equal(closes, tokens == 14)
    assert closes[range(3), used - 1].all()


def test_hidden_bytes_are_runs_and_known():
    rows = np.random.default_rng(0).integers(0, 250, (5, 100)).astype("int32")
    sizes = {"every": 6, "run": 2}
    inputs, hidden = both_ways.hide(rows, np.random.default_rng(1), sizes)
    places = inputs["mask_positions"]
    # 8 stretches of 12 bytes, each with a run of two.
    assert places.shape == (5, 16)
    assert (places[:, 1::2] == places[:, ::2] + 1).all()
    assert (places[:, ::2] // 12 == np.arange(8)).all()
    for row in range(5):
        assert (rows[row, places[row]] == hidden[row]).all()
        restored = inputs["token_ids"][row].copy()
        assert (restored[places[row]] == both_ways.HIDDEN).all()
        restored[places[row]] = hidden[row]
        assert (restored == rows[row]).all()


class Remembers:
    """A model that keeps its inputs, and finds a hidden byte as likely as its place."""

    table = np.random.default_rng(1).normal(size=(256, 256)).astype("float32")

    def predict(self, inputs, batch_size, verbose):
        self.inputs = inputs
        return self.table[inputs["mask_positions"] % 24]


def test_the_same_hidden_bytes_count_at_all_lengths():
    text = np.random.default_rng(0).integers(0, 250, 500).astype("uint8")
    sizes = {"lengths": [24, 72], "windows": 3, "batch": 2, "length": 24}
    sizes |= {"every": 6, "run": 2}
    short, long = Remembers(), Remembers()
    measured = both_ways.bits_per_byte(short, text, 24, sizes)
    assert both_ways.bits_per_byte(long, text, 72, sizes) == pytest.approx(measured)
    middle = long.inputs["token_ids"][:, 24:48]
    np.testing.assert_array_equal(middle, short.inputs["token_ids"])
    places = short.inputs["mask_positions"]
    np.testing.assert_array_equal(long.inputs["mask_positions"], places + 24)
    # Windows begin at 0, 214 and 428; bytes are hidden around the middle too.
    logits = Remembers.table.astype("float64")
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = []
    for row, start in enumerate((0, 214, 428)):
        whole = text[start : start + 72]
        shown = long.inputs["token_ids"][row] != both_ways.HIDDEN
        assert (long.inputs["token_ids"][row][shown] == whole[shown]).all()
        assert (~shown).reshape(3, 24).sum(1).tolist() == [4, 4, 4]
        nats += [-logs[place, whole[24 + place]] for place in places[row]]
    assert measured == pytest.approx(np.mean(nats) / math.log(2), rel=1e-5)


def record(candidate, convolution, bits, seed=0):
    return {
        "candidate": candidate,
        "convolution": convolution,
        "seed": seed,
        "sizes": language.SIZES,
        "options": CANDIDATES[candidate].options(convolution),
        "result": {"bits_per_byte": {"1024": bits, "4096": bits, "16384": bits + 1}},
        "seconds": 1800.0,
    }


PAGES = ("README.md", "docs/choosing.md", "docs/benchmarks/verdict.md")
MARKS = ("verdict", "properties", *PARTS, "cost", "hours", "rates")


def make_pages(root, marks=MARKS):
    (root / "docs" / "benchmarks").mkdir(parents=True)
    places = "".join(f"<!-- {mark} -->\nold\n<!-- end -->\n" for mark in marks)
    for page in PAGES:
        (root / page).write_text(f"before\n{places}after\n")


def cells_below(path, mark):
    _, _, text = path.read_text().partition(f"<!-- {mark} -->\n")
    lines = text.partition("<!-- end -->")[0].splitlines()
    return [re.split(r" *\| *", line)[1:-1] for line in lines]


def write_costs(folder, seconds):
    """Files of the part `cost`: a dict from mode and backend to layers' seconds."""
    folder.mkdir()
    for (mode, backend), layers in seconds.items():
        settings = Settings(tuple(layers), (4096,), mode=mode, backend=backend)
        records = [
            Record(name, backend, mode, 4096, "ok", seconds=value, memory_bytes=2**21)
            for name, value in layers.items()
        ]
        machine = {"cpu": "some chip", "cpu_count": 2}
        comparison = Comparison(settings, records, machine)
        write_json(comparison, folder / f"{mode}-{backend}-4096.json")


def test_the_tables_have_means_deviations_and_costs(tmp_path):
    results = tmp_path / "results"
    (results / "language").mkdir(parents=True)
    faster = language.SIZES | {"learning_rate": 0.5}
    records = [
        record("softmax", False, 2.4),
        record("softmax", True, 2.25),
        record("softmax", True, 2.75, seed=1),
        record("linear", True, 2.0),
        record("linear, local in turn", True, 3.0),
        record("linear", False, 1.0) | {"sizes": {"dim": 4}},
        record("softmax", True, 2.125) | {"sizes": faster},
        record("linear", False, 1.0) | {"options": {}},
    ]
    for number, each in enumerate(records):
        (results / "language" / f"{number}.json").write_text(json.dumps(each))
    train = {"softmax": 4.0, "linear": 1.0, "local:window=64": 2.0}
    measured = {
        ("train", "jax"): train,
        ("train", "torch"): {"softmax": 0.5, "linear": 1.0},
        ("decode", "jax"): {"softmax": 1.0},
    }
    write_costs(results / "cost", measured)
    make_pages(tmp_path)
    arguments = ["--results", str(results), "--root", str(tmp_path)]
    assert verdict_page.main(arguments) == 0
    language_rows = cells_below(tmp_path / PAGES[2], "language")
    spread = f"{np.std([2.25, 2.75], ddof=1):.3f}"
    # By the bits.
    assert language_rows[2] == ["linear", "yes", "2.000", "2.000", "3.000", "1"]
    assert language_rows[3][:3] == ["softmax", "no", "2.400"]
    assert language_rows[4][2] == f"2.500 ± {spread}" and language_rows[4][-1] == "2"
    assert len(language_rows) == 6
    header, _, linear, softmax, turns = cells_below(tmp_path / PAGES[1], "verdict")
    assert header == ["attention", "bits per byte at 1,024", "at 16,384"]
    assert softmax[1] == f"2.500 ± {spread}"
    header, _, linear, softmax, turns = cells_below(tmp_path / PAGES[1], "properties")
    memory = header.index("memory of a training step")
    assert linear[memory] == "1"
    step, state = header.index("training step"), header.index("state, KiB")
    assert [row[step] for row in (linear, softmax, turns)] == ["0.25", "1", "0.38"]
    torch = header.index("on PyTorch")
    assert [row[torch] for row in (linear, softmax, turns)] == ["2", "1", "-"]
    token = header.index("generated token")
    assert [row[token] for row in (linear, softmax)] == ["-", "1"]
    # Of two layers: 4 heads of 32 × 32, 32 sums of keys and a maximum, in float32;
    # and keys and values of 16,384 positions.
    heads = 2 * 4 * (32 * 32 + 32) * 4
    assert float(linear[state]) == pytest.approx(heads / 1024, abs=0.6)
    cache = 2 * 2 * 16384 * 128 * 4
    assert float(softmax[state].replace(",", "")) == pytest.approx(
        cache / 1024, rel=0.01
    )
    assert [row[-3:] for row in (linear, softmax)] == [
        ["a constant state", "no", "optional"],
        ["a growing cache", "yes", "optional"],
    ]
    costs = cells_below(tmp_path / PAGES[2], "cost")
    measured = ["jax 4,096", "torch 4,096", "MiB, jax 4,096", "MiB, torch 4,096"]
    assert ["layer", *measured] in costs
    assert ["linear", "1,000", "1,000", "2", "2"] in costs
    text = (tmp_path / PAGES[2]).read_text()
    assert text.count("Machine of jax: 2 cores of some chip.") == 1
    rates = cells_below(tmp_path / PAGES[2], "rates")
    assert rates == [
        ["attention", f"{language.SIZES['learning_rate']:g}", "0.5"],
        ["---"] * 3,
        ["softmax", "2.250", "2.125"],
    ]
    # Half an hour each, also at another rate; other sizes or options do not count.
    hours = cells_below(tmp_path / PAGES[2], "hours")
    assert ["language", "6", "3.0"] in hours and ["recall", "0", "0.0"] in hours
    assert hours[-1] == ["all", "6", "3.0"]
    familiar = [row[0] for row in cells_below(tmp_path / PAGES[0], "verdict")[2:]]
    assert familiar == ["linear", "softmax"]
    assert (tmp_path / "docs" / "verdict.png").stat().st_size > 1000
    for page in PAGES:
        text = (tmp_path / page).read_text()
        assert text.startswith("before\n") and text.endswith("after\n")


def test_no_mark_and_no_run_are_one_line(tmp_path, error_line):
    make_pages(tmp_path, marks=())
    arguments = ["--results", str(tmp_path / "none"), "--root", str(tmp_path)]
    assert "--results" in error_line(verdict_page, arguments)
    assert "--root" in error_line(verdict_page, ["--root", str(tmp_path)])


def test_pages_have_the_tables_of_the_runs():
    results = verdict_page.collect(verdict_page.RESULTS)
    for name, tables in verdict_page.pages(*results).items():
        text = (folders.ROOT / name).read_text()
        for mark, lines in tables.items():
            assert verdict_page.place(mark).search(text)[0] == (
                f"<!-- {mark} -->\n{lines}\n<!-- end -->"
            )


def test_costs_that_are_missing_are_measured(tmp_path, monkeypatch):
    calls = []

    def run(settings):
        calls.append((settings.lengths, settings.mode))
        return Comparison(settings, [], {})

    monkeypatch.setattr(cost, "run", run)
    sizes = {**cost.SIZES, "lengths": [16, 32]}
    names = ["linear", "linear, local in turn"]
    found = list(cost.measure(tmp_path, names, sizes))
    assert calls == [((n,), mode) for n in (16, 32) for mode in ("train", "decode")]
    assert {x.settings.layers for x in found} == {("linear", "local:window=64")}
    backend = keras.backend.backend()
    (tmp_path / f"train-{backend}-32.json").unlink()
    calls.clear()
    list(cost.measure(tmp_path, names, sizes))
    assert calls == [((32,), "train")]
    # Files with more layers have these too; those of other settings, or without a
    # layer, do not count.
    calls.clear()
    list(cost.measure(tmp_path, ["linear"], sizes))
    assert calls == []
    list(cost.measure(tmp_path, names, {**sizes, "lengths": [16], "time_limit": 1.0}))
    assert calls == [((16,), "train"), ((16,), "decode")]
    list(cost.measure(tmp_path, ["softmax"], {**sizes, "lengths": [32]}))
    assert calls[2:] == [((32,), "train"), ((32,), "decode")]


def test_models_of_one_seed_begin_alike():
    options = CANDIDATES["local"].options(True)
    weights = [
        [
            to_numpy(x)
            for x in models.backbone(options, SIZES, 256, "decoder", s).weights
        ]
        for s in (0, 0, 1)
    ]
    for first, same in zip(weights[0], weights[1], strict=True):
        np.testing.assert_array_equal(first, same)
    assert any((a != b).any() for a, b in zip(weights[0], weights[2], strict=True))


def test_readme_lists_the_layers_in_the_order_of_the_verdict():
    """By the fewest bits per byte that a layer has with any of its options."""
    rows, _, _ = verdict_page.collect(verdict_page.RESULTS)
    best = dict.fromkeys(
        attention_class(CANDIDATES[name].attention.partition(":")[0]).__name__
        for name, convolution in rows
        if convolution and isinstance(CANDIDATES[name].attention, str)
    )
    text = (folders.ROOT / "README.md").read_text().partition("## Layers")[2]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(best)
