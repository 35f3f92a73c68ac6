"""The settings, checked once, and the links that they describe."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from numbers import Real
from statistics import mean
from typing import Any, Literal

import torch

from lightning_topk.core.exchange import EXCHANGES, Endpoint, FusedLink, Link
from lightning_topk.core.layout import Layout, Parts, kept_count
from lightning_topk.core.memory import Memory, MomentumResidual, NoMemory, Residual
from lightning_topk.core.select import SELECTORS, RandK, Selector, TopK
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.schedule import CosineWarmup, ExponentialWarmup, Ratio, Schedule, ratio_at

AUTO_RATIOS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Those among which ``ratio="auto"`` chooses."""

START, PASSES = 0.12, 180
"""The default recipe: the density with which a run begins at most, and how often it sends each entry on average. What is kept back arrives
about 1 / density steps late, and a run must be long against that. START is what saves 50x the bytes of a run (and below the eighth that
choosing in one pass allows); PASSES is what it makes of 3,000 steps, the longest that ``python -m lightning_topk reproduce recipes``
measures."""


@dataclass(frozen=True)
class TopKConfig:
    """How gradients are compressed and exchanged.

    Args:
        ratio: Fraction of a bucket's gradient that each worker sends, in (0, 1]: a number, a
            :class:`lightning_topk.schedule.Schedule`, or a function of the step; ``"auto"`` measures, and takes the largest of
            :data:`AUTO_RATIOS` that costs at most 5 % more time than the cheapest.
        bidirectional: Whether the servers compress too. If not, they send all that is nonzero.
        server_ratio: Fraction of a bucket that the servers together send, likewise. Default: ``ratio``.
        selector: ``"topk"``, ``"gaussiank"``, ``"dgc"``, ``"trimmed"``, ``"randk"``, or an instance of
            :class:`lightning_topk.select.Selector`.
        wire: ``"bf16"``, ``"fp32"``, ``"int8"`` or ``"int4"`` (integers, and a scale for every 64 of them): the values' format.
            Positions are Elias-Fano coded in all. Default: the recipe's, else bf16.
        topology: ``"sharded"`` (every rank serves a shard), ``"hierarchical"`` (dense inside a node, sharded between nodes),
            ``"single_server"`` (rank 0 serves all), ``"allgather"`` (no server, hence ``bidirectional=False``) or ``"dense"``
            (all-reduce: nothing is compressed). ``"auto"`` measures, and takes for each bucket the fastest of dense, sharded
            and hierarchical.
        dense_parameters: Parameters that are never compressed, by name: a pattern such as ``"*.bias"``, or several.
        error_feedback: Whether what is not sent is kept for later: True on workers and servers, False nowhere,
            ``"worker"`` or ``"server"`` on that side only. What is not kept is lost.
        scope: ``"bucket"`` selects in each of DDP's buckets, while backward goes on; ``"model"`` selects once among all
            gradients, when backward is done, as the papers do.
        momentum: m of momentum correction (Lin et al. 2018), in [0, 1): momentum on the worker, before compression. The
            optimizer's own must then be 0.
        momentum_masking: Whether momentum is zeroed where it was sent.
        beta1: The first beta with which torch's Adam and AdamW step, in [0, 1). Their groups say what they said when they have
            stepped, and a group keeps its own if all of it is in ``dense_parameters``. Default: the recipe's, else their own.
        clip_norm: Norm to which W workers together clip a bucket's gradient (the model's with ``scope="model"``), before
            compression: each clips to ``clip_norm / sqrt(W)``. None does not clip.
        lr_ratio: Whether residuals are scaled by the last learning rate over this one (Zheng et al. 2019), so that what
            was kept back under one learning rate is applied under it.
        recipe: ``"default"``: where the number of steps is known (see :meth:`planned`), densities that are numbers below :data:`START`
            are what the run ends with. It begins with ``2 PASSES / steps``, at most :data:`START`, if that is more, and descends along
            half a cosine; values travel in int4, if ``error_feedback`` is True and ``wire`` says nothing else. Adam steps with a
            ``beta1`` of 0, if workers keep what they do not send and ``beta1`` and ``momentum`` say nothing else; with
            ``topology="auto"`` it keeps its own.
            ``"plain"``: densities are constant, as in the papers.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    ratio: Ratio | Literal["auto"] = 0.001
    bidirectional: bool = True
    server_ratio: Ratio | None = None
    selector: str | Selector = "topk"
    wire: str | None = None
    topology: str = "sharded"
    dense_parameters: str | Sequence[str] = ()
    error_feedback: bool | str = True
    scope: str = "bucket"
    momentum: float = 0.0
    momentum_masking: bool = True
    beta1: float | None = None
    clip_norm: float | None = None
    lr_ratio: bool = False
    recipe: str = "default"

    def __post_init__(self) -> None:
        check_name("recipe", self.recipe, ("default", "plain"))
        if self.ratio != "auto":
            _check_ratio("ratio", self.ratio, ', or "auto"')
        for name in ("bidirectional", "momentum_masking", "lr_ratio"):
            _check_bool(name, getattr(self, name))
        if not isinstance(self.error_feedback, bool):
            check_name("error_feedback", self.error_feedback, ("worker", "server"), ", True or False")
        if not isinstance(self.selector, Selector):
            check_name("selector", self.selector, SELECTORS, " or an instance of lightning_topk.select.Selector")
        if self.wire is not None:
            check_name("wire", self.wire, WIRES)
        check_name("topology", self.topology, [*EXCHANGES, "auto"])
        given = self.dense_parameters
        patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"dense_parameters={self.dense_parameters!r} must be a pattern of names, or several.")
        object.__setattr__(self, "dense_parameters", patterns)
        check_name("scope", self.scope, ("bucket", "model"))
        if self.topology == "allgather" and self.bidirectional:
            raise ValueError(
                "bidirectional=True does not go with topology='allgather': without a server there is no "
                "server-to-worker direction to compress. Pass bidirectional=False, or topology='sharded'."
            )
        exact = [
            words
            for words, holds in (
                (f"topology={self.topology!r}", self.topology in ("dense", "auto")),
                ("ratio='auto'", self.ratio == "auto"),
                (f"dense_parameters={patterns}", patterns),
            )
            if holds
        ]
        if exact and self.momentum:
            raise ValueError(
                f"momentum={self.momentum!r} corrects what the worker keeps, but with {exact[0]} gradients may be exchanged "
                "exactly, and nothing kept. Use the optimizer's own momentum."
            )
        if self.server_ratio is not None:
            _check_ratio("server_ratio", self.server_ratio)
            if not self.bidirectional:
                raise ValueError(
                    f"server_ratio={self.server_ratio!r} has no effect with bidirectional=False, where the server sends "
                    "all that is nonzero. Leave server_ratio out, or pass bidirectional=True."
                )
        _check_number("momentum", self.momentum, lambda m: 0 <= m < 1, "in [0, 1)", "Use 0 for none, 0.9 as DGC does.")
        if self.momentum and self.error_feedback not in (True, "worker"):
            raise ValueError(
                f"momentum={self.momentum!r} corrects what the worker keeps, but error_feedback={self.error_feedback!r} "
                "keeps nothing there. Pass error_feedback=True, or momentum=0 and the optimizer's own."
            )
        if self.beta1 is not None:
            remedy = "Leave it out, and the recipe decides."
            _check_number("beta1", self.beta1, lambda beta1: 0 <= beta1 < 1, "in [0, 1)", remedy)
        if self.topology == "allgather" and self.error_feedback == "server":
            raise ValueError(
                "error_feedback='server' keeps nothing with topology='allgather', which has no server. Pass 'worker', or "
                "topology='sharded'."
            )
        if self.lr_ratio and self.error_feedback is False:
            raise ValueError(
                "lr_ratio=True scales residuals, but error_feedback=False keeps none. Leave one of them out."
            )
        if self.clip_norm is not None:
            remedy = "Leave it out, and nothing is clipped."
            _check_number("clip_norm", self.clip_norm, lambda norm: 0 < norm < math.inf, "positive", remedy)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults."""
        return {each.name: here for each in fields(self) if (here := getattr(self, each.name)) != each.default}

    @property
    def lent_beta1(self) -> float | None:
        """The ``beta1`` that Adam is to step with; None for its own, as where nothing is compressed."""
        return None if self.topology == "dense" else self.beta1

    @property
    def by_plan(self) -> bool:
        """Whether a schedule must be told how many steps are planned."""
        return any(isinstance(r, Schedule) and r.by_plan for r in (self.ratio, self.server_ratio))

    @property
    def warms(self) -> bool:
        """Whether the recipe says something of the density, if the number of steps is known."""
        if self.recipe == "plain" or self.topology == "dense" or isinstance(self.ratio, str | Schedule):
            return False
        return not callable(self.ratio) and mean(self._numbers) < START

    @property
    def _numbers(self) -> list[float]:
        """Those of the ratios that are numbers."""
        ratios: list[Any] = [self.ratio, self.server_ratio]
        return [float(each) for each in ratios if isinstance(each, Real)]

    def planned(self, steps: float, world: int = 2) -> TopKConfig:
        """The settings of a run of so many optimizer steps: with what the recipe makes of them.

        Args:
            steps: Optimizer steps, infinite if the run has no end.
            world: Number of ranks. It matters where no server compresses: bytes grow with it then, so that the recipe begins with less.

        Raises:
            ValueError: A schedule is a share of a run that has no end.
        """
        ratios: dict[str, Any] = {"ratio": self.ratio, "server_ratio": self.server_ratio}
        wire, beta1 = self.wire, self.beta1
        if self.warms and steps < math.inf:
            if self.error_feedback is True:  # else the rounding would be lost
                wire = wire or "int4"
            if beta1 is None and not self.momentum and not self.automatic and self.error_feedback in (True, "worker"):
                beta1 = 0.0
            sent = 1.0 if self.bidirectional else world / 2 if self.topology == "allgather" else (1 + world) / 2
            rise = min(START / sent, 2 * PASSES / max(1.0, steps)) / mean(self._numbers)
            for name, ratio in ratios.items():
                if isinstance(ratio, Real) and rise > 1:  # a server's too, so that the two keep their proportion
                    ratios[name] = CosineWarmup(float(ratio), min(1.0, rise * float(ratio)), share=1.0)
        planned: dict[str, Any] = {name: r.planned(steps) for name, r in ratios.items() if isinstance(r, Schedule)}
        return replace(self, wire=wire, beta1=beta1, **planned)

    def remarks(self, steps: float, world: int, local: int) -> list[str]:
        """What a user of these settings should know before a run.

        Args:
            steps: Planned optimizer steps, infinite if nobody told.
            world: Number of ranks.
            local: Ranks of each node.
        """
        if self.on(world, local).topology == "dense":
            idle = [name for name in self.changed if name not in ("topology", "clip_norm", "scope")]
            if self.topology == "dense" and not idle:
                return []
            where = f"topology={self.topology!r}" + " on one node" * (self.topology != "dense")
            return [
                f"lightning_topk: {where} all-reduces whole gradients. Without effect: {', '.join(idle) or 'ratio'}."
            ]
        if not self.warms or self.automatic:
            return []
        if math.isinf(steps):
            return [
                "lightning_topk: nobody told how many steps are planned, so that the default recipe does nothing: the density is constant, "
                "and Adam keeps its beta1. Short runs learn better with it: give the Trainer max_steps, or a loader with a length; Fabric and plain DDP take "
                "planned_steps=. recipe='plain' wants none."
            ]
        ratio = self.planned(steps, world).ratio
        assert not isinstance(ratio, str)
        passes = steps * mean(ratio_at(ratio, int(end), 0) for end in (0, steps))  # half a cosine is symmetric
        if passes >= PASSES:
            return []
        return [
            f"lightning_topk: steps planned: {steps:,.0f}. Each entry of a gradient is sent {passes:.3g} times on average; in runs where it "
            f"was fewer than some {PASSES} times, models often learned less than with DDP. Plan more steps, or compare with DDP (README, "
            "Learning like dense)."
        ]

    def at(self, step: int, epoch: int) -> TopKConfig:
        """The settings in force at a step: numbers in the place of schedules. Mere functions of the step stay.

        Args:
            step: Gradients exchanged before this one.
            epoch: Epochs completed.
        """
        ratios = {"ratio": self.ratio, "server_ratio": self.server_ratio}
        found: dict[str, Any] = {name: r.at(step, epoch) for name, r in ratios.items() if isinstance(r, Schedule)}
        return replace(self, **found)

    @property
    def automatic(self) -> bool:
        """Whether something is to be chosen by measuring."""
        return "auto" in (self.topology, self.ratio) and self.topology != "dense"

    def candidates(self, world: int, local: int) -> list[TopKConfig]:
        """The settings with all that is automatic chosen, in every way but dense.

        Args:
            world: Number of ranks.
            local: Ranks of each node.
        """
        hierarchy = ["hierarchical"] * (1 < local < world)
        topologies = ["sharded", *hierarchy] if self.topology == "auto" else [self.topology]
        ratios = AUTO_RATIOS if self.ratio == "auto" else [self.ratio]
        return [replace(self, topology=topology, ratio=ratio) for topology in topologies for ratio in ratios]

    @property
    def dense(self) -> TopKConfig:
        """The settings with all-reduce for everything."""
        return replace(self, topology="dense", ratio=1.0, momentum=0.0)

    def on(self, world: int, local: int) -> TopKConfig:
        """The settings for ranks on nodes: a hierarchy of one node is dense, one of nodes with one rank is sharded.

        With momentum on the workers, a hierarchy of one node is sharded too.

        Args:
            world: Number of ranks.
            local: Ranks of each node; ranks of a node are consecutive.

        Raises:
            ValueError: The ranks do not make up whole nodes.
        """
        if world % local:
            raise ValueError(
                f"{world} ranks do not make up nodes of {local}: every node needs the same number of ranks. "
                "Pass local_world_size=, the ranks of a node."
            )
        if self.topology != "hierarchical" or 1 < local < world:
            return self
        if local == world > 1 and not self.momentum:  # which is applied where something is kept
            return self.dense
        return replace(self, topology="sharded")

    def summary(self) -> dict[str, Any]:
        """The settings as words and numbers, which can be compared between processes: functions by what they return."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("ratio", "server_ratio"):
            if callable(found[name]):
                found[name] = [_told(found[name], step) for step in (0, 1, 10, 100, 1000, 10_000)]
        if isinstance(self.selector, Selector):
            plain = {key: value for key, value in vars(self.selector).items() if isinstance(value, int | float | str)}
            found["selector"] = f"{type(self.selector).__qualname__} with {plain}"
        return found

    def make_selector(self) -> Selector:
        """A selector with a step count of its own."""
        return SELECTORS[self.selector]() if isinstance(self.selector, str) else copy.deepcopy(self.selector)

    def codecs(
        self, numel: int, world: int, step: int = 0, epoch: int = 0, selector: Selector | None = None
    ) -> tuple[Layout, Codec, Codec | None]:
        """The sizes of one bucket's exchange.

        Args:
            numel: Elements of the bucket, or of a part of it, at least 1.
            world: Number of ranks that exchange it.
            step: Gradients exchanged before this one, for schedules.
            epoch: Epochs completed, for schedules.
            selector: The one that the codecs are used with. Default: a new one, if only sizes are wanted.

        Returns:
            The layout, the workers' codec, and the servers' (None where there are none). A server that does not compress
            has room for all that ``world`` workers can send it.
        """
        if self.automatic:
            raise ValueError(
                "with topology='auto' or ratio='auto' nobody knows the sizes before it was measured: take one of "
                "TopKConfig.candidates."
            )
        layout = Layout(numel, world if self.topology in ("sharded", "hierarchical") else 1)
        if self.topology == "dense":
            return layout, Codec(WIRES["fp32"], numel, numel), None
        selector = selector or self.make_selector()
        shared = selector if isinstance(selector, RandK) else None
        assert not isinstance(self.ratio, str)
        ratio = ratio_at(self.ratio, step, epoch)
        up = layout.kept_per_shard(kept_count(numel, ratio))
        if self.bidirectional:
            server_ratio = ratio if self.server_ratio is None else ratio_at(self.server_ratio, step, epoch)
            down = layout.kept_per_shard(kept_count(numel, server_ratio))
        else:
            # Workers that draw the same positions send nothing else.
            down = up if shared is not None else min(layout.shard_size, world * up)
        wire = WIRES[self.wire or "bf16"]
        uplink = Codec(wire, layout.shard_size, up, shared)
        reply = None if self.topology == "allgather" else Codec(wire, layout.shard_size, down, shared)
        return layout, uplink, reply

    def endpoint(
        self,
        numel: int,
        rank: int,
        world: int,
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, ...] | None = None,
        local: int = 1,
        exact: Sequence[int] = (),
    ) -> Endpoint:
        """The links of one rank for one bucket, with empty memories.

        Args:
            numel: Elements of the bucket, at least 1.
            rank: The rank.
            world: Number of ranks.
            dtype: dtype of the bucket. Residuals are float64 for float64 and float32 otherwise.
            device: Where the residuals live.
            sizes: Elements of each parameter. Default: there is one.
            local: Ranks of a node, for ``topology="hierarchical"``.
            exact: Which of the parameters, by number, are not compressed.
        """
        selector = self.make_selector()
        sizes, clip_norm = sizes or (numel,), None if self.clip_norm is None else self.clip_norm / math.sqrt(world)
        parts, given, workers = Parts(sizes), dtype, world
        if self.topology == "hierarchical":
            parts, given = Parts(sizes, local), torch.promote_types(dtype, torch.float32)
            numel, rank, world = parts.numel, rank // local, world // local
        layout, up, down = self.codecs(numel, world, selector=selector)
        delivered, dtype = dtype, torch.promote_types(dtype, torch.float32)

        def memory(side: str, numel: int) -> Memory:
            if self.error_feedback not in (True, side) or self.topology == "dense":
                return NoMemory(dtype)
            if side == "worker" and self.momentum:
                return MomentumResidual(numel, dtype, device, self.momentum, self.momentum_masking)
            return Residual(numel, dtype, device)

        def link(
            layout: Layout,
            selector: Selector,
            codec: Codec,
            memory: Memory,
            given: torch.dtype,
            delivered: torch.dtype | None = None,
        ) -> Link:
            # On a GPU the one pass sends what a threshold lets pass; a server that does not compress sends all that is nonzero.
            whole = layout.shards == 1 and not self.bidirectional and device.type != "cpu"
            kind = FusedLink if FusedLink.suits(selector, memory, given) and not whole else Link
            return kind(layout, selector, codec, memory, delivered)

        downlink = None
        if down is not None and (layout.shards == world or rank == 0):
            # What a server that does not compress has to send are sums of selections: it takes the largest exactly.
            choice = selector if self.bidirectional or isinstance(selector, RandK) else TopK()
            own = Layout(layout.shard_size)
            downlink = link(own, choice, down, memory("server", layout.shard_size), dtype, delivered)
        uplink = link(layout, selector, up, memory("worker", numel), given)
        ends = list(accumulate(sizes))
        return Endpoint(
            topology=self.topology,
            parts=parts,
            layout=layout,
            rank=rank,
            world=world,
            dtype=dtype,
            uplink=uplink,
            downlink=downlink,
            reply=down,
            sizes=torch.tensor(sizes, device=device),
            clip_norm=clip_norm,
            servers_keep=down is not None and self.error_feedback in (True, "server"),
            exact=[(ends[number] - sizes[number], ends[number]) for number in exact],
            workers=workers,
        )

    def resize_(self, end: Endpoint, step: int, epoch: int) -> None:
        """Has an endpoint keep what the schedules say for this step.

        Args:
            end: The endpoint, from :meth:`endpoint`.
            step: Gradients exchanged before this one.
            epoch: Epochs completed.
        """
        _, end.uplink.codec, end.reply = self.codecs(end.layout.numel, end.world, step, epoch, end.uplink.selector)
        if end.downlink is not None and end.reply is not None:
            end.downlink.codec = end.reply


def _told(ratio: Ratio, step: int) -> float | str:
    """What a schedule says for a step, which may lie beyond those that it is made for."""
    try:
        return ratio_at(ratio, step, step // 100)
    except Exception as error:
        return repr(error)


def _check_ratio(name: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, Schedule) or (callable(value) and not isinstance(value, type)):
        return
    remedy = f"Use {name}=0.001 to send one entry in a thousand, 1 to send all{otherwise}."
    _check_number(name, value, lambda ratio: 0 < ratio <= 1, "in (0, 1]: the fraction that is sent", remedy)


def _check_number(name: str, value: Any, allowed: Callable[[float], bool], words: str, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a number {words}. {remedy}")
    if not allowed(float(value)):  # NaN is not either
        raise ValueError(f"{name}={value!r} must be {words}. {remedy}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be True or False.")


def check_name(name: str, value: Any, known: Iterable[str], otherwise: str = "") -> None:
    """Refuses a setting that is not one of the known names; ``otherwise`` says what else is allowed.

    Raises:
        TypeError: It is no string.
        ValueError: It is another string.
    """
    allowed = f"it must be one of {', '.join(map(repr, known))}{otherwise}."
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; {allowed}")
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; {allowed}")


def check_count(name: str, value: Any) -> int | None:
    """Refuses what is neither None nor a positive number of things; returns it.

    Raises:
        TypeError: It is no integer.
        ValueError: It is not positive.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an integer, or None.")
    if value is not None and value < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")
    return value


_SYSTEMS: dict[str, dict[str, Any]] = {
    "dense": {"ratio": 1.0, "bidirectional": False, "wire": "fp32", "error_feedback": False},
    "topk": {"topology": "allgather", "bidirectional": False},
    "bidirectional_topk": {"bidirectional": True},
    "randk": {"selector": "randk", "bidirectional": False},
    "gaussiank": {"selector": "gaussiank", "topology": "allgather", "bidirectional": False},
    "dgc": {
        "selector": "dgc",
        "topology": "allgather",
        "bidirectional": False,
        "ratio": ExponentialWarmup(0.001, start=0.25, epochs=4),
        "momentum": 0.9,
        "clip_norm": 1.0,
        "scope": "model",
    },
    "trimmed": {"selector": "trimmed", "topology": "allgather", "bidirectional": False},
    "parameter_server": {"topology": "single_server", "bidirectional": True},
}
presets: Mapping[str, Mapping[str, Any]] = {name: {"recipe": "plain", **system} for name, system in _SYSTEMS.items()}
"""The systems of the papers, literally, as arguments of :class:`TopKConfig` and of the strategies.

``dense``: Dense-SGD, through the exchange. ``topk``, ``gaussiank``, ``trimmed``: TopK-SGD of Shi et al. 2019, by all-gather, with
that selector. ``randk``: the same random positions everywhere. ``dgc``: DGC-SGD of Lin et al. 2018, whole; set the optimizer's momentum
to 0. ``bidirectional_topk``: Zou 2022 with a server on every rank; ``parameter_server``: with one.
"""
