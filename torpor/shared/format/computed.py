"""Sequences that compute each element when it is asked for, and keep none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Computed(Sequence[T]):
    """A sequence whose elements are made again at each access."""

    @abstractmethod
    def at(self, number: int) -> T:
        """The element with this number, from 0. Raises IndexError behind the last."""

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...
    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        if isinstance(number, slice):
            return [self.at(n) for n in range(len(self))[number]]
        return self.at(number if number >= 0 else range(len(self))[number])


class SelectedElements(Computed[T]):
    """Some of a sequence's elements, by their numbers in it."""

    def __init__(self, whole: Sequence[T], numbers: Sequence[int]) -> None:
        self._whole = whole
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def at(self, number: int) -> T:
        return self._whole[self._numbers[number]]
