"""The recall experiment and the maze: data, environment, and one tiny run of each."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rl_memory
import xl_recall
from maze.curves import smooth
from maze.environment import FORWARD, TMaze
from maze.training import learning_targets
from recall.training import PlantedSymbols

pytestmark = pytest.mark.any_backend


def test_a_document_has_one_symbol_in_its_first_segment():
    data = PlantedSymbols(documents=2, batch=3, length=4, segments=3, symbols=5, seed=1)
    assert len(data) == 6
    for first in (0, 3):
        batches = [data[first + i] for i in range(3)]
        tokens = np.concatenate([x["token_ids"] for x, _, _ in batches], axis=1)
        targets = np.concatenate([y for _, y, _ in batches], axis=1)
        weights = np.concatenate([w for _, _, w in batches], axis=1)
        resets = [x["reset"].tolist() for x, _, _ in batches]
        assert resets == [[True] * 3, [False] * 3, [False] * 3]
        for row in range(3):
            (place,) = np.flatnonzero(tokens[row])
            assert place < 4 and np.all(targets[row] == tokens[row, place])
            np.testing.assert_array_equal(weights[row], np.arange(12) >= place)


def test_the_recall_table_marks_the_reach(printed_table, capsys):
    arguments = (
        "--models 1x4 --segment 4 --segments 3 --symbols 2 --dim 4 --heads 1 "
        "--batch 2 --steps 3 --test-documents 2 --verbose 0 --seeds 0 1"
    )
    assert xl_recall.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    header, *cells = printed_table(printed)
    assert header[:4] == ["layers", "memory", "in evaluation", "reach"]
    assert header[4:] == ["0 back", "1 back", "2 back"]
    sizes = [["1", "4", "4", "4"], ["1", "4", "8", "8"]]
    assert [row[:4] for row in cells] == sizes
    assert [[cell.endswith("]") for cell in row[4:]] for row in cells] == [
        [False, True, False],
        # The whole document is within reach.
        [False, False, False],
    ]
    assert all("±" in cell for row in cells for cell in row[4:])
    assert "50.0 %" in printed.splitlines()[-1]


def test_the_maze_rewards_the_side_of_the_sign():
    maze = TMaze(corridor=3)
    check_env(maze, skip_render_check=True)
    sides = set()
    for seed in range(6):
        observation, _ = maze.reset(seed=seed)
        goal = 1 + int(observation[:2].argmax())
        sides.add(goal)
        assert observation.sum() == 1 and observation[:2].max() == 1
        assert maze.step(goal)[1] == pytest.approx(-0.1)
        for cell in range(1, 4):
            observation, reward, terminated, _, _ = maze.step(FORWARD)
            assert (reward, terminated) == (0.0, False)
            assert observation.tolist() == [0, 0, cell < 3, cell == 3]
        chosen = goal if seed % 2 else 3 - goal
        _, reward, terminated, _, _ = maze.step(chosen)
        assert terminated and reward == (1 if chosen == goal else -1)
    assert sides == {1, 2}
    maze.reset(seed=0)
    ends = [maze.step(1)[3] for _ in range(8)]
    assert ends == [False] * 7 + [True]


def test_targets_are_discounted_and_weigh_only_what_happened():
    episodes = {
        "actions": np.array([[0, 2, 0]]),
        "rewards": np.array([[-0.1, 1.0, 0.0]]),
        "values": np.array([[0.5, 0.5, 7.0]]),
        "weights": np.array([[1.0, 1.0, 0.0]]),
    }
    action, advantage, returns, weight = np.moveaxis(
        learning_targets(episodes, discount=0.5), -1, 0
    )
    np.testing.assert_allclose(returns, [[0.4, 1.0, 0.0]], rtol=1e-6)
    scale = np.sqrt((0.1**2 + 0.5**2) / 2)
    np.testing.assert_allclose(advantage[0], np.array([-0.1, 0.5, 0]) / scale, 1e-4)
    np.testing.assert_allclose(weight, [[1.5, 1.5, 0.0]])
    np.testing.assert_array_equal(action, episodes["actions"])
    np.testing.assert_allclose(smooth([0.0, 1.0]), [0.5])


def test_the_maze_script_leaves_its_curves(tmp_path, capsys):
    arguments = (
        "--agents gtrxl lstm --corridor 2 --seeds 0 --updates 2 --episodes 2 --dim 4 "
        f"--layers 1 --heads 1 --verbose 0 --out {tmp_path}"
    )
    assert rl_memory.main(arguments.split()) == 0
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "agent,run,update,found"
    assert [line.split(",")[0] for line in lines[1:]] == ["gtrxl"] * 2 + ["lstm"] * 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| GTrXL |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (xl_recall, "--models 2x5"),
        (xl_recall, "--models two"),
        (xl_recall, "--dim 5 --heads 2"),
        (rl_memory, "--agents none"),
        (rl_memory, "--corridor 0"),
        (rl_memory, "--out /dev/null/here"),
    ],
)
def test_wrong_arguments_are_one_line(script, arguments, error_line):
    assert error_line(script, arguments.split())
