"""Stage timers: every second belongs to one stage."""

from itertools import pairwise

from hypothesis import given, strategies as st

from gcore_controller import Span, StageTimer, seconds_by_stage


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_inner_stage_suspends_the_outer_one() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    with timer.stage("gen"):
        clock.now_s += 2
        with timer.stage("reward"):
            clock.now_s += 3
        clock.now_s += 4
    clock.now_s += 5
    with timer.stage("train"):
        clock.now_s += 6
    spans = timer.drain()
    assert spans == [
        Span(stage="gen", start_s=0, end_s=2),
        Span(stage="reward", start_s=2, end_s=5),
        Span(stage="gen", start_s=5, end_s=9),
        Span(stage="train", start_s=14, end_s=20),
    ]
    assert seconds_by_stage(spans) == {"gen": 6, "reward": 3, "train": 6}
    assert timer.drain() == []


def test_a_running_stage_is_cut_and_continues() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    with timer.stage("gen"):
        clock.now_s += 1
        assert seconds_by_stage(timer.drain()) == {"gen": 1}
        clock.now_s += 2
    assert seconds_by_stage(timer.drain()) == {"gen": 2}


def test_a_stage_ends_when_it_raises() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    try:
        with timer.stage("gen"), timer.stage("reward"):
            clock.now_s += 1
            raise KeyError
    except KeyError:
        clock.now_s += 1
    with timer.stage("train"):
        clock.now_s += 1
    assert seconds_by_stage(timer.drain()) == {"reward": 1, "train": 1}


Tree = list[tuple[str, int, "Tree"]]
trees: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda children: st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), children), max_size=3
    ),
    max_leaves=12,
)


@given(trees)
def test_stages_add_up_to_the_time_inside_them(tree: Tree) -> None:
    clock = Clock()
    timer = StageTimer(clock)
    expected: dict[str, float] = {}

    def walk(nodes: Tree) -> None:
        for name, seconds, children in nodes:
            with timer.stage(name):
                clock.now_s += seconds
                expected[name] = expected.get(name, 0.0) + seconds
                walk(children)

    walk(tree)
    spans = timer.drain()
    assert seconds_by_stage(spans) == {name: total for name, total in expected.items() if total}
    assert sum(span.end_s - span.start_s for span in spans) == clock.now_s
    assert all(span.end_s > span.start_s for span in spans)
    assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
