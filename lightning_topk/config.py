"""The settings, and checks of their values and combinations."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard

from typing_extensions import TypedDict

from lightning_topk.core.endpoint import Topology
from lightning_topk.core.exchange import TOPOLOGIES, TopologyName
from lightning_topk.core.select import SELECTORS, Selector
from lightning_topk.core.wire import WIRES, WireName
from lightning_topk.schedule import Ratio, Schedule, Varying, ratio_at

SAVING: float = 50  # the default without ``ratio``
CPU_BUCKET_MB = 8
"""Default bucket size on CPUs, in MiB: smaller than DDP's 25 MiB, so that more buckets overlap with backward."""


class Settings(TypedDict, total=False):
    """The settings as keywords. See :class:`lightning_topk.TopKStrategy`."""

    ratio: Ratio | None
    bidirectional: bool
    server_ratio: Ratio | None
    selector: str | Selector
    wire: WireName | None
    topology: TopologyName | None
    dense_parameters: str | Sequence[str]
    error_feedback: bool | Literal["worker"]
    momentum: float
    adapt_momentum: bool
    clip_norm: float | None
    saving: float | None


@dataclass(frozen=True)
class TopKConfig:
    """How gradients are compressed and exchanged.

    See :class:`lightning_topk.TopKStrategy` for each setting.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    ratio: Ratio | None = None
    bidirectional: bool = True
    server_ratio: Ratio | None = None
    selector: str | Selector = "topk"
    wire: WireName | None = None
    topology: TopologyName | None = None
    dense_parameters: str | Sequence[str] = ()
    error_feedback: bool | Literal["worker"] = True
    momentum: float = 0.0
    adapt_momentum: bool = True
    clip_norm: float | None = None
    saving: float | None = None

    def __post_init__(self) -> None:
        named: Any = self.dense_parameters
        if isinstance(named, Set):  # a set's order differs between ranks
            named = sorted(named, key=str)
        patterns = tuple(named) if isinstance(named, Iterable) and not isinstance(named, str) else (named,)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"dense_parameters={named!r} must be a name pattern or a list of them.")
        object.__setattr__(self, "dense_parameters", patterns)
        if self.ratio is None and self.saving is None:
            object.__setattr__(self, "saving", SAVING)
        for name in ("ratio", "server_ratio", "saving", "momentum", "clip_norm"):
            value: Any = getattr(self, name)
            if isinstance(value, Real) and type(value).__module__ != "builtins":
                with suppress(OverflowError):  # the checks below refuse it
                    object.__setattr__(self, name, float(value))  # torch.load(weights_only=True) refuses NumPy scalars
        _check_values(self)
        _check_combinations(self)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        defaults = {each.name: each.default for each in fields(self)} | {"saving": SAVING}
        own = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in own.items() if value is not None and value != defaults[name]}

    @cached_property
    def compresses(self) -> bool:
        """Whether anything is compressed."""
        return self._topology.compresses

    @cached_property
    def by_node(self) -> bool:
        """Whether the ranks of a node exchange as one worker."""
        return self._topology.by_node

    @cached_property
    def _topology(self) -> Topology:
        return TOPOLOGIES[self.topology or "sharded"]

    @cached_property
    def adapts_momentum(self) -> bool:
        """Whether optimizer momentum is adapted to compression."""
        return self.adapt_momentum and self.compresses and not self.momentum

    @property
    def waits(self) -> bool:
        """Whether gradients may wait in residuals."""
        lossless = self.ratio == 1 and self.server_ratio in (None, 1) and self.wire_name == "fp32"
        return self.compresses and bool(self.error_feedback) and not lossless

    @property
    def wire_name(self) -> str:
        """Name of the values' wire format."""
        return self.wire or ("int4" if self.error_feedback is True else "bf16")

    @property
    def dense(self) -> TopKConfig:
        """The same settings with a dense all-reduce of all gradients."""
        return replace(self, topology="dense", ratio=1.0, saving=None, server_ratio=None, momentum=0.0)

    def resolve(self, world: int, local: int, gpus: bool = False) -> TopKConfig:
        """Resolves the topology for ``world`` ranks, with ``local`` consecutive ranks per node, on GPUs if ``gpus``.

        The default is hierarchical on several nodes with several GPUs each, else sharded. On a single node hierarchical
        becomes dense (sharded with ``momentum``); with one rank per node, sharded. Refuses nodes of unequal size.
        """
        if world % local:
            raise ValueError(
                f"{world} ranks cannot be divided into nodes of {local}: every node needs the same number of ranks. "
                "Pass local_world_size=, the number of ranks per node."
            )
        nodes = 1 < local < world
        if self.by_node and not nodes:
            # Worker momentum needs a residual, and an all-reduce has none.
            return self.dense if local == world > 1 and not self.momentum else replace(self, topology="sharded")
        return replace(self, topology=self.topology or ("hierarchical" if gpus and nodes else "sharded"))

    def summary(self) -> dict[str, Any]:
        """The settings as strings and numbers that ranks can compare; functions and schedules are sampled."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("ratio", "server_ratio"):
            if varies(found[name]):
                found[name] = [_value_or_error(found[name], step) for step in (0, 1, 10, 100, 1000, 10_000)]
        if isinstance(self.selector, Selector):
            plain = {key: value for key, value in vars(self.selector).items() if isinstance(value, int | float | str)}
            found["selector"] = f"{type(self.selector).__qualname__} with {plain}"
        return found


def _check_values(config: TopKConfig) -> None:
    """Refuses settings that are invalid by themselves."""
    for name in ("ratio", "server_ratio"):
        value: Any = getattr(config, name)
        if varies(value):
            if not isinstance(value, Schedule):
                check_function(name, value, "the step", 0)
        else:
            remedy = f"Use {name}=0.001 to send one entry in a thousand, 1 to send all."
            _check_number(config, name, lambda ratio: 0 < ratio <= 1, "in (0, 1]: the fraction that is sent", remedy)
    remedy = "Use saving=50 for a fiftieth of the bytes, topology='dense' to save none."
    _check_number(config, "saving", lambda saving: saving >= 1, "1 or more", remedy)
    _check_number(config, "momentum", lambda m: 0 <= m < 1, "in [0, 1)", "Use 0 for none, 0.9 as DGC does.")
    _check_number(config, "clip_norm", lambda norm: norm > 0, "positive", "Leave it out to disable clipping.")
    for name in ("bidirectional", "adapt_momentum"):
        check_bool(name, getattr(config, name))
    if not isinstance(config.error_feedback, bool):
        check_name("error_feedback", config.error_feedback, ("worker",), ", True or False")
    if not isinstance(config.selector, Selector):
        check_name("selector", config.selector, SELECTORS, " or an instance of lightning_topk.select.Selector")
    if config.wire is not None:
        check_name("wire", config.wire, WIRES)
    if config.topology is not None:
        check_name("topology", config.topology, TOPOLOGIES)


def _check_combinations(config: TopKConfig) -> None:
    """Refuses settings that contradict each other."""
    if config.ratio is not None and config.saving is not None:
        raise ValueError(
            f"ratio={config.ratio!r} and saving={config.saving!r} both say how much to send. Pass only one: ratio= is "
            "the fraction of entries to send, saving= the factor by which to send fewer bytes."
        )
    if config.server_ratio is not None and config.saving is not None:
        raise ValueError(
            f"server_ratio={config.server_ratio!r} needs ratio=: saving={config.saving:g} sets what both workers "
            "and servers send. Pass ratio= instead of saving=, or leave server_ratio out."
        )
    if config.compresses and not config._topology.has_servers and config.bidirectional:
        raise ValueError(
            f"bidirectional=True is incompatible with topology={config.topology!r}: without a server there is no "
            "server-to-worker direction to compress. Pass bidirectional=False, or topology='sharded'."
        )
    if config.server_ratio is not None and not config.bidirectional:
        raise ValueError(
            f"server_ratio={config.server_ratio!r} has no effect with bidirectional=False, where the server sends "
            "every nonzero entry. Leave server_ratio out, or pass bidirectional=True."
        )
    without = [f"topology={config.topology!r}"] * (not config.compresses)
    without += [f"dense_parameters={config.dense_parameters}"] * bool(config.dense_parameters)
    without += [f"error_feedback={config.error_feedback!r}"] * (not config.error_feedback)
    if config.momentum and without:
        raise ValueError(
            f"momentum={config.momentum!r} needs a residual for every parameter. Leave out {' and '.join(without)}, "
            "or pass momentum=0 and use the optimizer's momentum."
        )


def varies(ratio: Ratio | None) -> TypeGuard[Varying]:
    """Whether a ratio is a function or a schedule, not a number."""
    return isinstance(ratio, Schedule) or (callable(ratio) and not isinstance(ratio, type))


def _value_or_error(ratio: Varying, step: int) -> float | str:
    """Returns the ratio at a step, or the error's type if the function fails: its message may differ between ranks."""
    try:
        return ratio_at(ratio, step, step // 100)
    except Exception as error:
        return type(error).__name__


def _check_number(config: TopKConfig, name: str, allowed: Callable[[float], bool], words: str, remedy: str) -> None:
    """Refuses a setting unless it is an allowed number, or None where None is the default."""
    value: Any = getattr(config, name)
    if value is None and getattr(TopKConfig, name) is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a number {words}. {remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{name}={value!r:.50} must be finite. {remedy}")
    if not allowed(number):  # this also refuses NaN
        raise ValueError(f"{name}={value!r} must be {words}. {remedy}")


def check_bool(name: str, value: Any) -> None:
    """Raises a TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be True or False.")


def check_name(name: str, value: Any, known: Iterable[str], otherwise: str = "") -> None:
    """Refuses a value that is not one of the known names; ``otherwise`` describes other allowed values."""
    allowed = f"it must be one of {', '.join(map(repr, known))}{otherwise}."
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; {allowed}")
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; {allowed}")


def check_function(name: str, value: Any, takes: str = "", *arguments: Any) -> None:
    """Refuses a value that cannot be called with these arguments; ``takes`` describes them in the message."""
    fits = callable(value)
    with suppress(ValueError):  # a function of C may have no signature
        try:
            inspect.signature(value).bind(*arguments)
        except TypeError:
            fits = False
    if not fits:
        raise TypeError(f"{name}={value!r} must be a function of {takes or 'no arguments'}.")


def check_count(name: str, value: Any, otherwise: str = "None") -> int | None:
    """Returns the value if it is None or a positive integer; ``otherwise`` is how the user writes None."""
    return None if value is None else check_integer(name, value, otherwise=f", or {otherwise}")


def check_integer(name: str, value: Any, least: int = 1, most: float = math.inf, otherwise: str = "") -> int:
    """Returns an integer (NumPy's included) as an int; refuses other types, and values not in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an integer{otherwise}.")
    if not least <= int(value) <= most:
        words = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} must be {words}.")
    return int(value)


def check_known(name: str, options: Mapping[str, Any], takers: Iterable[Callable[..., Any]]) -> None:
    """Refuses unknown keyword arguments, unless a taker's signature names none, as after a tool has wrapped it."""
    known: set[str] = set()
    for taker in takers:
        taken = inspect.signature(taker).parameters.values()
        named = {each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
        named -= {"self", "module", "device_ids"}
        if not named:
            return
        known |= named
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known))}."
            raise TypeError(f"{name} got an unknown argument {option}={options[option]!r}; {hint}")


def check_config(taker: Callable[..., Any], config: Any) -> None:
    """Refuses a value that is not a TopKConfig."""
    if not isinstance(config, TopKConfig):
        words = "it must be a TopKConfig, such as TopKConfig(ratio=0.1)."
        raise TypeError(f"{taker.__name__}: config={config!r} is a {type(config).__name__}; {words}")


def one_config(taker: Callable[..., Any], config: TopKConfig | None, settings: Settings) -> TopKConfig:
    """Returns the settings that a function or class received as a config or as keywords."""
    if config is not None:
        check_config(taker, config)
        if settings:
            raise ValueError(f"pass either config or the settings {sorted(settings)}, not both.")
    check_known(taker.__name__, dict(settings), [TopKConfig, taker])
    return config or TopKConfig(**settings)
