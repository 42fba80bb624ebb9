import os

import pytest

from keras_efficient_attn.ops.common.backend import BACKEND
from keras_efficient_attn.ops.common.feature_kernels import choice
from tests.contract.cases import CASES, case_of, ids


# Before the marks of `tests/conftest.py`, which depend on these.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks variants, and deselects them in tests marked `once_a_layer`."""
    for item in items:
        case = case_of(item)
        if case is not None and case.variant:
            item.add_marker(pytest.mark.one_backend)
    items[:] = [
        item
        for item in items
        if item.get_closest_marker("once_a_layer") is None
        or case_of(item) is None
        or not case_of(item).variant
    ]


@pytest.fixture(params=CASES, ids=ids)
def case(request):
    return request.param


def pytest_generate_tests(metafunc):
    """Pairs a case with each causal setting it supports; a variant with its usual."""
    if "setting" in metafunc.fixturenames:
        settings = [
            (case, causal)
            for case in CASES
            for causal in ((case.usual,) if case.variant else case.causal)
        ]
        names = [f"{c.name}-{'causal' if causal else 'full'}" for c, causal in settings]
        metafunc.parametrize("setting", settings, ids=names)
    if "causal_case" in metafunc.fixturenames:
        causal_cases = [case for case in CASES if True in case.causal]
        metafunc.parametrize("causal_case", causal_cases, ids=ids)


@pytest.fixture(autouse=True)
def forced_kernel(monkeypatch):
    """With `FORCED_KERNEL=pallas` or `triton`, this kernel runs where it can."""
    if "FORCED_KERNEL" in os.environ:
        assert choice.KERNELS[os.environ["FORCED_KERNEL"]].backend == BACKEND
        monkeypatch.setattr(choice, "has_kernels", lambda query: True)
