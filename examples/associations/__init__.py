"""Tasks of recalling and of tracking a state."""

# Tasks that track a state, with their numbers of tokens.
TRACKING = {"parity": 2, "permutations": 6}
