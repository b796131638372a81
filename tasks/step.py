"""A step of a flow: a function with one side effect, named and retried on its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

from tasks.phases import phase
from tasks.retries import USUAL, StepRetries
from tasks.runner import Pending, runner

P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """Calling or submitting a step asks the runner of this context to do it: in a flow run of
    Prefect it becomes a task run. ``function`` is what it does, without retries. A call counts as
    ``phase`` of its run, if that is not empty; what is submitted does not."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        run_name: str | None,
        retries: StepRetries,
        phase: str,
    ) -> None:
        self.function = function
        self.name = name
        self.run_name = run_name
        self.retries = retries
        self.phase = phase
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with phase(self.phase) if self.phase else nullcontext():
            return runner().call(self, *args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        return runner().submit(self, *args, **kwargs)

    def label(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The name of one call: ``scan 2``."""
        if self.run_name is None:
            return self.name
        return self.run_name.format(**signature(self.function).bind(*args, **kwargs).arguments)


def step(
    name: str, *, run_name: str | None = None, retries: StepRetries = USUAL, phase: str = ""
) -> Callable[[Callable[P, R]], Step[P, R]]:
    """Make a step of a function. ``run_name`` may name its parameters, as in ``scan {number}``."""
    return lambda function: Step(function, name, run_name, retries, phase)
