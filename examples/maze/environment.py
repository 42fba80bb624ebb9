"""The T-maze, as a gymnasium environment."""

import gymnasium
import numpy as np

FORWARD, LEFT, RIGHT = range(3)
# Channels of an observation: the sign for each side, the corridor, the junction.
SIGNS, CORRIDOR, JUNCTION = (0, 1), 2, 3


class TMaze(gymnasium.Env):
    """A corridor with a sign at its beginning, and a choice at its end.

    The sign is seen once, in the first observation. At the junction, turning to the
    indicated side gives 1, turning to the other side -1, and both end the episode.
    Other actions without progress cost 0.1. An episode is truncated after twice the
    required steps.

    Args:
        corridor: Steps from the start to the junction.
    """

    def __init__(self, corridor):
        self.corridor = corridor
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)

    @property
    def max_steps(self):
        return 2 * (self.corridor + 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = self.steps = 0
        self.goal = int(self.np_random.integers(LEFT, RIGHT + 1))
        return self._observation(sign=True), {}

    def step(self, action):
        self.steps += 1
        reward, terminated = 0.0, False
        if action == FORWARD and self.cell < self.corridor:
            self.cell += 1
        elif action != FORWARD and self.cell == self.corridor:
            reward, terminated = (1.0 if action == self.goal else -1.0), True
        else:
            reward = -0.1
        truncated = not terminated and self.steps >= self.max_steps
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self, sign=False):
        observation = np.zeros(4, np.float32)
        place = JUNCTION if self.cell == self.corridor else CORRIDOR
        observation[self.goal - LEFT if sign else place] = 1.0
        return observation
