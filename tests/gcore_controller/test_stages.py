import pytest

from gcore_controller import Span, StageTimer, seconds_by_stage


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_nested_stage_suspends_the_outer_one() -> None:
    clock = _Clock()
    timer = StageTimer(clock)
    with timer.stage("gen"):
        clock.now_s = 2.0
        with timer.stage("reward"):
            clock.now_s = 5.0
        clock.now_s = 6.0
    clock.now_s = 7.0
    with timer.stage("train"):
        clock.now_s = 11.0
    spans = timer.drain()
    assert spans == [
        Span(stage="gen", start_s=0.0, end_s=2.0),
        Span(stage="reward", start_s=2.0, end_s=5.0),
        Span(stage="gen", start_s=5.0, end_s=6.0),
        Span(stage="train", start_s=7.0, end_s=11.0),
    ]
    assert seconds_by_stage(spans) == {"gen": 3.0, "reward": 3.0, "train": 4.0}
    assert timer.drain() == []


def test_draining_cuts_a_running_stage_without_losing_time() -> None:
    clock = _Clock()
    timer = StageTimer(clock)
    with timer.stage("gen"):
        clock.now_s = 1.0
        first = timer.drain()
        clock.now_s = 4.0
    assert seconds_by_stage(first) == {"gen": 1.0}
    assert seconds_by_stage(timer.drain()) == {"gen": 3.0}


def test_a_stage_that_raises_still_ends() -> None:
    clock = _Clock()
    timer = StageTimer(clock)

    def fail() -> None:
        clock.now_s = 1.0
        raise KeyError

    with pytest.raises(KeyError), timer.stage("gen"):
        fail()
    clock.now_s = 9.0
    assert seconds_by_stage(timer.drain()) == {"gen": 1.0}
