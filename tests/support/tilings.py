"""Hypothesis strategies: shapes cut at any borders, and who holds the boxes."""

from __future__ import annotations

from hypothesis import strategies as st

from ckpt.format.box import Box, whole


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], max_boxes: int) -> list[Box]:
    """Boxes that make up a shape: cut in two, one of them again, and so on, along any dimension. Some may be empty."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, max_boxes - 1)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        boxes += [_part(box, dim, 0, at), _part(box, dim, at, box.shape[dim])]
    return boxes


@st.composite
def held(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> list[Box | None]:
    """By rank, the box that it holds of a tensor: every box is held, some by several ranks; None: it holds nothing."""
    boxes = draw(cuts(shape, world_size))
    more = st.lists(st.sampled_from([*boxes, None]), min_size=world_size - len(boxes), max_size=world_size - len(boxes))
    return draw(st.permutations([*boxes, *draw(more)]))


def _part(box: Box, dim: int, start: int, stop: int) -> Box:
    offsets, sides = list(box.offsets), list(box.shape)
    offsets[dim] += start
    sides[dim] = stop - start
    return Box(tuple(offsets), tuple(sides))
