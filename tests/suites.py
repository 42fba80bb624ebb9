"""What leaves the gate: tests that `make test-all` runs, and the gate does not.

A test is named by the beginning of its path below `tests`. The gate keeps what a change
that looks harmless can break, once, in the cheapest form: for every layer on every
backend its oracle, gradients, causality, padding, streams, saving and its place in
Keras' models; the main cases of operations; each task; each example and command.
"""

# Marks of what the gate leaves out, on some backend or on all.
LEAVES_THE_GATE = ("nightly", "any_backend", "one_backend", "tpu_compile", "export")

# Not in the gate at all: compilers that take minutes, processes that are started or
# killed, long runs of training, and what draws at random.
NIGHTLY = (
    "accelerators/",
    "fuzz/",
    "long_runs/",
    "test_guides.py",
    # Exports, and compilers of accelerators and of PyTorch.
    "contract/test_accelerators.py",
    "contract/test_saving.py::test_saved_model_export",
    "contract/test_settings.py::test_tasks_and_their_files",
    "contract/test_torch_compile.py",
    "ops/test_torch_compile.py",
    "ops/test_linear_attention_triton",
    "ops/common/test_fused_softmax_torch.py::test_a_compiled_program",
    "ops/common/test_interval_softmax.py",
    # Keras' own tests, for layers beside softmax.
    "contract/test_keras_own.py::test_keras_own_tests_pass",
    # Processes.
    "distribution/test_in_own_processes.py",
    "examples/test_kill_training.py",
    "examples/test_finite_steps.py::test_the_script",
    "examples/test_train_byte_lm.py::test_killed_run",
    "examples/test_distill_byte_lm.py::test_a_teacher_whose_training_was_killed",
    "examples/test_train_distributed.py",
    "layers/attention/test_vq.py::test_two_replicas",
    "models/conversion/test_convert_backbone.py::test_classes_are_made_when_a_file",
    "models/conversion/test_pickle.py::test_another_process",
    "tools/test_measure_gpu.py::test_the_command",
    "models/test_quantized_files.py::test_a_fresh_process",
    # Formulae that take long to evaluate.
    "ops/test_fourier.py::test_gradients_are_the_slopes_of_the_definition[fused",
    "ops/test_fourier.py::test_densities",
    "ops/test_fourier.py::test_regressions",
    # Training beyond one smoke of each script.
    "examples/test_train_byte_lm.py::test_layers_with_decays",
    "models/conversion/test_distill.py::test_stages",
    "models/conversion/test_distill.py::test_a_run_goes_on",
    "models/tasks/test_tasks.py::test_parameters_are_those_of_the_page",
    "layers/residual/test_reversible.py::test_training_curves",
    "research/test_claims.py",
    "research/test_measure_soft_codes.py",
)
# In the gate although they begin as above.
KEPT = (
    "distribution/test_in_own_processes.py::test_on_eight_devices[check_model_",
    "distribution/test_in_own_processes.py::test_on_eight_devices[check_sequence_",
    "contract/test_saving.py::test_saved_model_export[gated-delta]",
    "contract/test_settings.py::test_tasks_and_their_files[classifier]",
    "contract/test_torch_compile.py::test_a_layer_is_one_program[grid]",
    "contract/test_torch_compile.py::test_a_layer_is_one_program[elu]",
    "contract/test_torch_compile.py::test_a_layer_is_one_program[strided]",
    "contract/test_keras_own.py::test_keras_own_tests_pass[softmax",
    "ops/common/test_interval_softmax.py::test_local_attention_is_the_masked_softmax",
    "ops/test_linear_attention_triton.py::test_outputs_and_gradients_are_those_of_the_"
    "reference[elu]",
    "research/test_claims.py::test_wrong_arguments",
)
# On one backend in the gate, on all in `make test-all`: models, conversion, reports,
# files and commands, whose layers and operations other tests cover on each backend.
ONE_BACKEND = (
    "benchmark/",
    "contract/test_errors.py",
    "distribution/",
    "models/",
    "test_docstrings.py",
    "test_outside_layer.py",
)
# On all backends although they begin as above: a backbone by its definition, generation
# from states, a task that is trained and saved, a converted model, and JAX's devices.
EVERY_BACKEND = (
    "distribution/test_in_own_processes.py::test_on_eight_devices",
    "models/test_backbone.py::test_a_decoder_is_the_transformer_of_the_definition",
    "models/tasks/test_causal_lm.py::test_generation_equals",
    "models/tasks/test_tasks.py::test_training_goes_on_after_loading",
    "models/conversion/test_generation.py::test_tokens_are_those_of_whole_calls[gpt2",
)


def marks_of(name):
    """The marks of a test `folder/module.py::function[parameters]`."""
    marks = []
    if name.startswith(NIGHTLY) and not name.startswith(KEPT):
        marks.append("nightly")
    if name.startswith(ONE_BACKEND) and not name.startswith(EVERY_BACKEND):
        marks.append("one_backend")
    return marks
