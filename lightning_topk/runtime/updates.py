"""What is done to an optimizer right before it updates the parameters: after its closure, which may be a whole step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from typing_extensions import Self


class Prepared(ABC):
    """Changes to one optimizer, made before each update on request. Use :meth:`of`: one instance per optimizer.

    Args:
        optimizer: The optimizer.
    """

    _known: ClassVar[WeakKeyDictionary[Optimizer, Any]]

    def __init_subclass__(cls) -> None:
        cls._known = WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        self.wanted: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """The request of each requester, as long as that lives."""
        _before_update(optimizer, self.reset, self.prepare)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Returns the instance of an optimizer, and creates it if needed."""
        if optimizer not in cls._known:
            cls._known[optimizer] = cls(optimizer)
        found: Self = cls._known[optimizer]
        return found

    @classmethod
    def withdraw(cls, optimizers: Iterable[Optimizer], requester: Any) -> None:
        """Forgets what a requester wants of some optimizers."""
        for optimizer in optimizers:
            if optimizer in cls._known:
                cls.of(optimizer).wanted.pop(requester, None)

    @abstractmethod
    def reset(self) -> None:
        """Undoes what :meth:`prepare` did, if a failed update left it so, or if a closure is called again."""

    @abstractmethod
    def prepare(self, optimizer: Optimizer) -> None:
        """Does what is wanted. Gradients are there; the parameters are still those of the step before."""


def _before_update(optimizer: Optimizer, reset: Callable[[], None], prepare: Callable[[Optimizer], None]) -> None:
    """Calls ``reset`` and ``prepare`` in each ``optimizer.step()``: before and after its closure, if it has one."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reset()
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            prepare(optimizer)
            return None

        def closure() -> Any:
            reset()
            loss = given()
            prepare(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    optimizer.register_step_pre_hook(hook)
