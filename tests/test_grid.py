"""The grid of windows: whole between boundaries, without a gap, and never a number that falls."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.grid import Grid

INSTANTS = st.integers(0, 10_000)
GRIDS = st.builds(Grid, st.integers(1, 1_000), st.lists(INSTANTS, max_size=5).map(tuple))


def test_a_window_ends_early_at_a_boundary_and_the_next_begins_there() -> None:
    grid = Grid(10, (25, 40))
    assert [grid.bounds(i) for i in range(7)] == [(0, 10), (10, 20), (20, 25), (25, 35), (35, 40), (40, 50), (50, 60)]
    assert [grid.index(at) for at in (-1, 0, 24, 25, 39, 40, 55)] == [0, 0, 2, 3, 4, 5, 6]
    assert [grid.count(length) for length in (0, 1, 25, 26, 40, 41)] == [0, 1, 3, 4, 5, 6]


def test_boundaries_that_are_none_do_not_count() -> None:
    assert Grid(10, (0, -3, 40, 40, 25)) == Grid(10, (25, 40))
    assert Grid(10, (20,)).bounds(2) == (20, 30)


@given(GRIDS, INSTANTS)
def test_every_instant_is_in_its_window_and_windows_follow_each_other(grid: Grid, at: int) -> None:
    index = grid.index(at)
    since, until = grid.bounds(index)
    assert since <= at < until <= since + grid.window_ns
    assert grid.bounds(index + 1)[0] == until
    assert grid.indices(np.array([at, at]))[0] == index
    assert grid.count(at) == (grid.index(at - 1) + 1 if at else 0)


@given(GRIDS, INSTANTS, INSTANTS)
def test_a_boundary_that_is_added_lets_no_number_fall(grid: Grid, boundary: int, at: int) -> None:
    assert grid.moved((*grid.boundaries_ns, boundary)).index(at) >= grid.index(at)
