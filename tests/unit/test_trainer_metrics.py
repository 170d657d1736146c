"""metrics.jsonl over restarts, and TensorBoard's event files."""

import json
from pathlib import Path

from specfleet.trainer.metrics import MetricsFile, TensorBoard, last_line
from specfleet.trainer.reduction import Sums


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resume_drops_what_the_checkpoint_does_not_contain(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(1, 6):
        file.write({"step": step, "loss": 1.0 / step})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 6, "lo')
    resumed = MetricsFile(path, 3)
    resumed.write({"step": 4, "loss": 0.5})
    resumed.sync()
    resumed.close()
    assert steps(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[3])["loss"] == 0.5


def test_last_line_skips_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_line(path) is None
    path.write_text("".join(json.dumps({"step": step, "pad": "x" * 300}) + "\n" for step in range(100)) + '{"step": 1')
    assert last_line(path) == {"step": 99, "pad": "x" * 300}


def test_metrics_are_ratios_of_sums_over_ranks() -> None:
    """3/1 on one rank and 3/3 on the other are 6/4, not the mean of their ratios."""
    ranks = [Sums({"loss_0": (3.0, 1.0)}, 10, 1, 1), Sums({"loss_0": (3.0, 3.0)}, 20, 3, 2), Sums()]
    total = Sums.total([rank.fact() for rank in ranks])
    assert total == Sums({"loss_0": (6.0, 4.0)}, 30, 4, 3)


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    board.write({"step": 1, "loss": 2.0, "time": 0.0})
    board.sync()
    board.close()
    assert next(path.name for path in tmp_path.iterdir()).startswith("events.")
