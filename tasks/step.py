"""A step of a flow: a function with one side effect, named and retried on its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

from tasks.phases import phase
from tasks.progress import doing
from tasks.retries import USUAL, StepRetries
from tasks.runner import StepFuture, runner

P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """Calling or submitting a step asks the runner of this context to do it: in a flow run of
    Prefect it becomes a task run. ``function`` is what it does, without retries. A call counts as
    ``phase`` of its run, and shows what it ``says``, if these are not empty. A submitted step does
    neither. ``run_name`` and ``says`` may name the function's parameters, as in ``scan
    {number}``."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        run_name: str | None,
        retries: StepRetries,
        phase: str,
        says: str,
    ) -> None:
        self.function = function
        self.name = name
        self.run_name = run_name
        self.retries = retries
        self.phase = phase
        self.says = says
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with (
            phase(self.phase) if self.phase else nullcontext(),
            doing(self._filled(self.says, *args, **kwargs)) if self.says else nullcontext(),
        ):
            return runner().call(self, *args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> StepFuture[R]:
        return runner().submit(self, *args, **kwargs)

    def label(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """The name of one call, such as ``scan 2``."""
        return self.name if self.run_name is None else self._filled(self.run_name, *args, **kwargs)

    def _filled(self, words: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
        return words.format(**signature(self.function).bind(*args, **kwargs).arguments)


def step(
    name: str,
    *,
    run_name: str | None = None,
    retries: StepRetries = USUAL,
    phase: str = "",
    says: str = "",
) -> Callable[[Callable[P, R]], Step[P, R]]:
    """Make a step of a function; the parameters are the fields of Step."""
    return lambda function: Step(function, name, run_name, retries, phase, says)
