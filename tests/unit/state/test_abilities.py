"""What an object offers beside its state."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ckpt.state.abilities import Declared, Elastic, Forgetful, RankPrivate, offers, tied_names


class Whole:
    rank_private = ("seed",)
    tied_names = MappingProxyType({"head": "embedding"})

    def forget_prepared(self) -> None: ...

    def fits(self, saved: Any) -> bool:
        return True


class Wrapper:
    """Hands on to another object what it has not itself, as torch's and users' wrappers do."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_ability_is_seen_through_a_wrapper() -> None:
    for stateful in (Whole(), Wrapper(Whole())):
        assert offers(stateful, Forgetful) and offers(stateful, RankPrivate)
        assert not offers(stateful, Elastic), "it has one of two methods"
        assert not offers(stateful, Declared)
        assert tied_names(stateful) == {"head": "embedding"}


def test_a_method_that_is_none_is_not_offered() -> None:
    without = Whole()
    without.forget_prepared = None  # type: ignore[method-assign,assignment]
    assert not offers(without, Forgetful)
    assert tied_names(object()) == {}
