"""Estimates for an accelerator that is not present, and how they are read."""

import importlib.util
import json
import re

import keras
import pytest

from tools import compile_for_tpu
from tools.compile_for_tpu import Estimate
from tools.tpu_estimate import estimated_cycles, kernel_cycles

jax_only = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the compiler is JAX's"
)
# A loop of 5 trips around a fusion of 100 cycles, another fusion of 7, a conditional
# over both, and a kernel.
PROGRAM = """HloModule jit_f
%body (p: (s32[])) -> (s32[]) {
  %fusion.1 = f32[8] fusion(), backend_config={"estimated_cycles":"100"}
}
%condition (p: (s32[])) -> pred[] {
  %constant.2 = s32[] constant(5)
}
%called (p: f32[8]) -> f32[8] {
  %fusion.3 = f32[8] fusion(), backend_config={"estimated_cycles":"7"}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %while.1 = (s32[]) while(%x), condition=%condition, body=%body
  %call.1 = f32[8] call(%x), to_apply=%called
  %cond.1 = f32[8] conditional(%x, %x), branch_computations={%body, %called}
  %kernel = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"
}
"""


def test_loops_count_as_often_as_they_run_and_conditions_once():
    assert estimated_cycles(PROGRAM) == (5 * 100 + 7 + 7, 1)
    assert estimated_cycles(PROGRAM, branch=max) == (5 * 100 + 7 + 100, 1)
    assert estimated_cycles(PROGRAM, {"kernel": 50}) == (5 * 100 + 7 + 7 + 50, 1)


@jax_only
def test_the_cycles_of_a_kernel_are_its_bundles_times_its_programs(tmp_path):
    program = lowered_kernel(rows=24, block=8)
    with pytest.raises(RuntimeError, match="no schedule of the kernel kernel.1"):
        kernel_cycles(program, tmp_path)
    schedule = tmp_path / "1-kernel.1-02-schedule-analysis_final_bundles.txt"
    schedule.write_text("total scheduled bundles:    70\n")
    assert kernel_cycles(program, tmp_path) == {"kernel.1": 70 * (24 // 8)}
    # Of equal kernels, one has a schedule.
    again = program.replace("kernel.1", "kernel.2")
    both = dict.fromkeys(("kernel.2", "kernel.1"), 70 * (24 // 8))
    assert kernel_cycles(f"{again}\n{program}", tmp_path) == both


def lowered_kernel(rows, block):
    """A line as of a compiled program, with a kernel of `rows / block` programs."""
    import jax
    from jax.experimental import pallas

    def double(source, target):
        target[...] = 2 * source[...]

    blocks = pallas.BlockSpec((block, 128), lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((rows, 128), "float32")
    call = pallas.pallas_call(
        double,
        out_shape=array,
        grid=(rows // block,),
        in_specs=[blocks],
        out_specs=blocks,
    )
    lowered = jax.jit(call).trace(array).lower(lowering_platforms=("tpu",)).as_text()
    body = re.search(r"\\22body\\22: ?\\22([^\\]+)", lowered)[1]
    return (
        '  %kernel.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"body":"{body}"}}}}'
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pip install"),
        (["--layers", "sofmax"], "sofmax"),
        (["--backend", "torch"], "--backend torch"),
        (["--mode", "decode"], "decode"),
        (["--model"], "--model"),
        (["--repeats", "3"], "--repeats 3"),
        (["--out", "here"], "--out"),
        (["--against", __file__], "not a file that this command wrote"),
        (["--devices", "2", "1"], "must divide --batch 1"),
        (["--devices", "1", "128", "--heads", "128"], "at most 64 devices"),
        (["--devices", "0", "1"], "--devices 0 1"),
    ],
)
def test_what_has_no_estimate_is_refused_in_one_line(
    arguments, said, monkeypatch, capsys
):
    found = importlib.util.find_spec

    def find_spec(name):
        if name == "libtpu":
            return None if said == "pip install" else True
        return found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert compile_for_tpu.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


@pytest.fixture
def compiler(monkeypatch):
    """Dict of layers to the fields of their estimates, which a fake compiler gives."""
    found, fields = importlib.util.find_spec, {}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "libtpu" or found(name)
    )
    versions = {"libtpu": "0.1", "jax": "0.2", "keras": "0.3"}
    monkeypatch.setattr(compile_for_tpu, "versions", lambda: versions)

    def estimate_all(settings, target, split):
        for name in settings.layers:
            yield Estimate(name, *settings.lengths, **{"status": "ok", **fields[name]})

    monkeypatch.setattr(compile_for_tpu, "estimate_all", estimate_all)
    return fields


def test_estimates_are_compared_with_earlier_ones(compiler, tmp_path, capsys):
    file = tmp_path / "runs" / "before.json"
    arguments = ["--layers", "linear", "vq", "--lengths", "64"]
    compiler["linear"] = dict(seconds=1e-3)
    compiler["vq"] = dict(seconds=1e-3, kernels=1, kernel_seconds=4e-3)
    assert compile_for_tpu.main([*arguments, "--save", str(file)]) == 0
    content = json.loads(file.read_text())
    seconds = [record["seconds"] for record in content["records"]]
    assert seconds == pytest.approx([1e-3, 5e-3])
    assert content["environment"]["libtpu"] == "0.1"
    against = [*arguments, "--against", str(file)]
    # The sum counts: the kernel is slower, and all else faster.
    compiler["vq"] = dict(seconds=0.1e-3, kernels=1, kernel_seconds=5.3e-3)
    assert compile_for_tpu.main(against) == 0
    assert "Of 2 times, none is over a tenth longer" in capsys.readouterr().out
    compiler["vq"] = dict(seconds=0.3e-3, kernels=1, kernel_seconds=5.3e-3)
    assert compile_for_tpu.main(against) == 1
    (line,) = capsys.readouterr().out.split("slower than before")[1].splitlines()[1:]
    assert line.split() == ["vq", "64", "1.12"]


def test_a_layer_without_an_estimate_is_an_error(compiler, tmp_path):
    file = tmp_path / "before.json"
    arguments = ["--layers", "linear", "--lengths", "64"]
    compiler["linear"] = dict(seconds=1e-3)
    assert compile_for_tpu.main([*arguments, "--save", str(file)]) == 0
    compiler["linear"] = dict(status="failed", detail="it does not compile")
    assert compile_for_tpu.main([*arguments, "--against", str(file)]) == 1


def test_other_shapes_and_measured_times_are_not_compared(compiler, tmp_path, capsys):
    file = tmp_path / "before.json"
    arguments = ["--layers", "linear", "--lengths", "64"]
    compiler["linear"] = dict(seconds=1e-3)
    compile_for_tpu.main([*arguments, "--save", str(file)])
    against = [*arguments, "--against", str(file)]
    assert compile_for_tpu.main([*against, "--heads", "3"]) == 2
    assert "same heads. Received: 3 in this run, 8" in capsys.readouterr().err
    assert compile_for_tpu.main([*against, "--devices", "1", "2"]) == 2
    assert "tpu-v5e with --devices [1, 2]" in capsys.readouterr().err
    content = json.loads(file.read_text())
    content["environment"] = {"device": "cpu"}
    file.write_text(json.dumps(content))
    assert compile_for_tpu.main(against) == 2
    assert "has no estimates for tpu-v5e" in capsys.readouterr().err
