"""The files of a run's metrics."""

import json
import math

from plaudit.metrics_files import MetricsFiles
from plaudit.world import World


class Two(World):
    """Two processes, of which the other one has the same metrics."""

    def gather(self, value, what):
        return [value, {**value, "rank": 1}]


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_process_has_no_metrics_of_its_own(tmp_path):
    files = MetricsFiles(tmp_path, World.alone())
    files.append({"step": 1, "loss": math.nan, "time/step_s": 0.123456})
    assert lines(files.of_run) == [{"step": 1, "loss": None, "time/step_s": 0.1235}]
    assert not files.of_ranks.exists()


def test_a_line_per_step_and_process(tmp_path):
    files = MetricsFiles(tmp_path, Two(0, 2, World.alone().device))
    row = files.append({"step": 1, "loss": 0.5, "time/sample_s": 3.0, "time/update_s": 2.0, "rank/sample_s": 1.00004})
    assert row == {"step": 1, "loss": 0.5, "time/sample_s": 3.0, "time/update_s": 2.0}
    assert lines(files.of_run) == [row]
    first, second = lines(files.of_ranks)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["sample_s"], first["update_s"]) == (1.0, 2.0), "its own, where it has one"
    assert first["machine"]
    assert first["memory_gb"] > 0
    assert "loss" not in first


def test_a_resumed_run_drops_the_lines_that_it_makes_again(tmp_path):
    files = MetricsFiles(tmp_path, Two(0, 2, World.alone().device))
    for step in (1, 2, 3):
        files.append({"step": step, "loss": 0.5})
    with files.of_ranks.open("a") as file:
        file.write('{"step": 3, "ra')  # killed
    files.keep_before(3)
    assert [row["step"] for row in files.read()] == [1, 2]
    assert [(row["step"], row["rank"]) for row in lines(files.of_ranks)] == [(1, 0), (1, 1), (2, 0), (2, 1)]
