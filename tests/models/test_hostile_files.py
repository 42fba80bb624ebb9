"""Untrusted files are rejected: models, presets, LoRA and distillation."""

import json
import shutil
import sys
import zipfile
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest

from keras_efficient_attn.models import EfficientTransformerBackbone
from keras_efficient_attn.models.conversion.distillation_stages import DistillationStage

pytestmark = pytest.mark.any_backend

# Keras may raise either class for a file that it rejects.
REFUSED = (TypeError, ValueError)


def make_backbone():
    return EfficientTransformerBackbone(16, 1, 2, 8, 16, attention="linear")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a saved model, a preset and LoRA weights."""
    folder = tmp_path_factory.mktemp("files")
    backbone = make_backbone()
    backbone.save(folder / "model.keras")
    backbone.save_to_preset(str(folder / "preset"))
    backbone.enable_lora(2)
    backbone.save_lora_weights(str(folder / "weights.lora.h5"))
    return folder


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that must not be imported."""
    (tmp_path / "hostile_module.py").write_text("class Layer: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hostile_module"
    assert "hostile_module" not in sys.modules


def edit_config(config, change, module):
    """The config with a Lambda, or a class to import, inserted."""
    foreign = {"module": module, "class_name": "Layer", "config": {}}
    if change == "lambda":
        foreign = keras.saving.serialize_keras_object(keras.layers.Lambda(lambda x: x))
    if change == "class":
        return {**foreign, "registered_name": None}
    config["config"]["embedding"]["features"] = [foreign]
    return config


def write_model(source, target, change=None, module=None, sizes=()):
    """Copies a `.keras` file; `sizes` are the archive's declared member sizes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            contents = old.read(name)
            if name == "config.json" and change is not None:
                config = edit_config(json.loads(contents), change, module)
                contents = json.dumps(config).encode()
            new.writestr(name, contents)
        for member in new.filelist:
            member.file_size = dict(sizes).get(member.filename, member.file_size)


MESSAGES = {
    "lambda": "[Ll]ambda",
    "class": "Could not locate class 'Layer'|no class registered",
    "feature": "Could not locate class 'Layer'",
}


@pytest.mark.parametrize("change", MESSAGES)
def test_models_with_foreign_code_are_refused(files, tmp_path, module, change):
    path = tmp_path / "model.keras"
    write_model(files / "model.keras", path, change, module)
    with pytest.raises(REFUSED, match=MESSAGES[change]):
        keras.saving.load_model(path)


@pytest.mark.parametrize("change", MESSAGES)
def test_presets_with_foreign_code_are_refused(files, tmp_path, module, change):
    preset = shutil.copytree(files / "preset", tmp_path / "preset")
    config = edit_config(
        json.loads((preset / "config.json").read_text()), change, module
    )
    (preset / "config.json").write_text(json.dumps(config))
    with pytest.raises(REFUSED, match=MESSAGES[change]):
        EfficientTransformerBackbone.from_preset(str(preset))


@pytest.mark.parametrize("member", ["config.json", "model.weights.h5"])
def test_archives_that_would_grow_beyond_measure_are_refused(files, tmp_path, member):
    path = tmp_path / "model.keras"
    write_model(files / "model.keras", path, sizes={member: 5 * 2**30})
    with pytest.raises(ValueError, match=f"'{member}' declares 5.00 GB"):
        keras.saving.load_model(path)


def test_a_member_that_grows_in_truth_is_refused(files, tmp_path):
    path = shutil.copy(files / "model.keras", tmp_path / "model.keras")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("assets/bomb", "w", force_zip64=True) as member:
            for _ in range(300):
                member.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="'assets/bomb' declares 300.00 MB"):
        keras.saving.load_model(path)
    assert [file.name for file in tmp_path.rglob("*")] == ["model.keras"]


def test_members_that_climb_out_are_written_nowhere(files, tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    path = shutil.copy(files / "model.keras", folder / "model.keras")
    absolute = tmp_path / "absolute"
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("../climbed", "assets/../../climbed", str(absolute)):
            archive.writestr(name, "written")
    with pytest.warns(UserWarning, match="Skipping invalid path") as warned:
        keras.saving.load_model(path)
    messages = " ".join(str(warning.message) for warning in warned)
    for name in ("'../climbed'", "'assets/../../climbed'", str(absolute)):
        assert name in messages
    assert [file.name for file in tmp_path.rglob("*")] == ["inside", "model.keras"]


def test_presets_read_no_weights_outside_of_them(files, tmp_path):
    preset = shutil.copytree(files / "preset", tmp_path / "preset")
    shutil.move(preset / "model.weights.h5", tmp_path / "outside.weights.h5")
    shutil.copy(tmp_path / "outside.weights.h5", preset / "model_00000.weights.h5")
    with h5py.File(tmp_path / "outside.weights.h5") as file:
        names = []
        file.visit(names.append)
    places = {f"/{name}": "../outside.weights.h5" for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (preset / "model.weights.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="'../outside.weights.h5'"):
        EfficientTransformerBackbone.from_preset(str(preset))


def change_factor(**options):
    """Replaces a factor by a dataset with these options."""

    def change(file, layer):
        del layer["lora_kernel_a"]
        layer.create_dataset("lora_kernel_a", dtype="float32", **options)

    return change


def link_factor(link):
    def change(file, layer):
        del layer["lora_kernel_a"]
        layer["lora_kernel_a"] = link

    return change


def change_rank(rank):
    def change(file, layer):
        file["lora/vars/rank"][()] = rank

    return change


LORA_CHANGES = {
    "another rank": (change_rank(3), "are not of rank 3"),
    "a rank beyond measure": (change_rank(10**12), "are not of rank 1000000000000"),
    "a negative rank": (change_rank(-1), "are not of rank -1"),
    "a link out": (link_factor(h5py.ExternalLink("other.h5", "/x")), "is a link"),
    "a link": (link_factor(h5py.SoftLink("/lora/vars/rank")), "is a link"),
    "other files": (
        change_factor(shape=(8, 2, 2), external=[("/etc/hosts", 0, 128)]),
        "is not one of its arrays",
    ),
    "no contents": (
        change_factor(shape=(10**9, 2), chunks=(1000, 2)),
        "its arrays have .* bytes",
    ),
    "no factor": (lambda file, layer: layer.pop("lora_kernel_b"), "lora_kernel_b"),
    "no rank": (lambda file, layer: file["lora"].pop("vars"), "rank"),
}


@pytest.mark.parametrize("change", LORA_CHANGES)
def test_foreign_lora_files_are_refused(files, tmp_path, change):
    edit, message = LORA_CHANGES[change]
    path = shutil.copy(files / "weights.lora.h5", tmp_path / "weights.lora.h5")
    with h5py.File(path, "r+") as file:
        layer = next(name for name in file["lora"] if name != "vars")
        edit(file, file["lora"][layer]["vars"])
    backbone = make_backbone()
    weights = [weight.path for weight in backbone.weights]
    with pytest.raises(ValueError, match="`filepath` is not a LoRA file.*" + message):
        backbone.load_lora_weights(str(path))
    assert [weight.path for weight in backbone.weights] == weights


def test_lora_files_that_are_none(tmp_path):
    (tmp_path / "junk.lora.h5").write_bytes(b"junk")
    with pytest.raises(ValueError, match="`filepath` is not a LoRA file"):
        make_backbone().load_lora_weights(str(tmp_path / "junk.lora.h5"))
    with pytest.raises(FileNotFoundError):
        make_backbone().load_lora_weights(str(tmp_path / "missing.lora.h5"))


@pytest.mark.parametrize("kind", ["compressed", "pickled"])
def test_foreign_distillation_files_are_refused(tmp_path, kind):
    path, values = tmp_path / "weights.npz", np.zeros(10**5)
    if kind == "compressed":
        np.savez_compressed(path, values)
        message = "arrays of 800,"
    else:
        np.savez(path, np.array([print], dtype=object))
        message = "allow_pickle"
    stage = SimpleNamespace(_changing_variables=[keras.Variable(values)])
    with pytest.raises(ValueError, match=message):
        DistillationStage.load_weights(stage, path)
