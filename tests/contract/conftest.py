import pytest

from tests.contract.cases import CASES, ids


@pytest.fixture(params=CASES, ids=ids)
def case(request):
    return request.param


def pytest_generate_tests(metafunc):
    """Pairs `causal_case` with each of the causal settings a case supports."""
    if "setting" in metafunc.fixturenames:
        settings = [(case, causal) for case in CASES for causal in case.causal]
        names = [f"{c.name}-{'causal' if causal else 'full'}" for c, causal in settings]
        metafunc.parametrize("setting", settings, ids=names)
    if "causal_case" in metafunc.fixturenames:
        causal_cases = [case for case in CASES if True in case.causal]
        metafunc.parametrize("causal_case", causal_cases, ids=ids)
