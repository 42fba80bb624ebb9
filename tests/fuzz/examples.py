"""How many examples a fuzz draws, and which."""

import os

import hypothesis

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 60))
SEED = os.environ.get("FUZZ_SEED")


def run_examples(check, strategy):
    """Calls `check` with `FUZZ_EXAMPLES` examples of a strategy."""

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        # Shrinking a finding needs many more compilations.
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def run(example):
        check(example)

    if SEED is not None:
        run = hypothesis.seed(int(SEED))(run)
    run()
