"""The settings, checked once, and the links that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from lightning_topk.exchange import EXCHANGES, Endpoint, Link
from lightning_topk.layout import Layout, kept_count
from lightning_topk.memory import Memory, NoMemory, Residual
from lightning_topk.select import SELECTORS, Selector
from lightning_topk.wire import WIRES, Codec


@dataclass(frozen=True)
class TopKConfig:
    """How gradients are compressed and exchanged.

    Args:
        ratio: Fraction of a bucket's gradient that each worker sends, in (0, 1].
        bidirectional: Whether the servers compress too. If not, they send all that is nonzero.
        server_ratio: Fraction of a bucket that the servers together send, in (0, 1]. Default: ``ratio``.
        selector: ``"topk"``, or an instance of :class:`lightning_topk.select.Selector`.
        wire: ``"bf16"`` or ``"fp32"``: the values' format. Positions are Elias-Fano coded in both.
        topology: ``"sharded"`` (every rank serves a shard), ``"single_server"`` (rank 0 serves all) or ``"allgather"``
            (no server, hence ``bidirectional=False``).
        error_feedback: Whether what is not sent is kept for later, on workers and servers. Without it, it is lost.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    ratio: float = 0.001
    bidirectional: bool = True
    server_ratio: float | None = None
    selector: str | Selector = "topk"
    wire: str = "bf16"
    topology: str = "sharded"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        _check_ratio("ratio", self.ratio)
        _check_bool("bidirectional", self.bidirectional)
        _check_bool("error_feedback", self.error_feedback)
        if not isinstance(self.selector, Selector):
            _check_name("selector", self.selector, SELECTORS, " or an instance of lightning_topk.select.Selector")
        _check_name("wire", self.wire, WIRES)
        _check_name("topology", self.topology, EXCHANGES)
        if self.topology == "allgather" and self.bidirectional:
            raise ValueError(
                "bidirectional=True does not go with topology='allgather': without a server there is no "
                "server-to-worker direction to compress. Pass bidirectional=False, or topology='sharded'."
            )
        if self.server_ratio is not None:
            _check_ratio("server_ratio", self.server_ratio)
            if not self.bidirectional:
                raise ValueError(
                    f"server_ratio={self.server_ratio!r} has no effect with bidirectional=False, where the server sends "
                    "all that is nonzero. Leave server_ratio out, or pass bidirectional=True."
                )

    def codecs(self, numel: int, world: int) -> tuple[Layout, Codec, Codec | None]:
        """The sizes of one bucket's exchange.

        Args:
            numel: Elements of the bucket, at least 1.
            world: Number of ranks.

        Returns:
            The layout, the workers' codec, and the servers' (None where there are none). A server that does not compress
            has room for all that ``world`` workers can send it.
        """
        layout = Layout(numel, world if self.topology == "sharded" else 1)
        wire = WIRES[self.wire]
        up = layout.kept_per_shard(kept_count(numel, self.ratio))
        down = min(layout.shard_size, world * up)
        if self.bidirectional:
            server_ratio = self.ratio if self.server_ratio is None else self.server_ratio
            down = layout.kept_per_shard(kept_count(numel, server_ratio))
        uplink = Codec(wire, layout.shard_size, up)
        return layout, uplink, None if self.topology == "allgather" else Codec(wire, layout.shard_size, down)

    def endpoint(
        self,
        numel: int,
        rank: int,
        world: int,
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, ...] | None = None,
    ) -> Endpoint:
        """The links of one rank for one bucket, with empty memories.

        Args:
            numel: Elements of the bucket, at least 1.
            rank: The rank.
            world: Number of ranks.
            dtype: dtype of the bucket. Residuals are float64 for float64 and float32 otherwise.
            device: Where the residuals live.
            sizes: Elements of each parameter, if some may go unused.
        """
        layout, up, down = self.codecs(numel, world)
        dtype = torch.promote_types(dtype, torch.float32)
        selector = SELECTORS[self.selector]() if isinstance(self.selector, str) else self.selector

        def memory(numel: int) -> Memory:
            return Residual(numel, dtype, device) if self.error_feedback else NoMemory(dtype)

        downlink = None
        if down is not None and (self.topology == "sharded" or rank == 0):
            downlink = Link(Layout(layout.shard_size), selector, down, memory(layout.shard_size))
        uplink = Link(layout, selector, up, memory(numel))
        return Endpoint(layout, rank, world, dtype, uplink, downlink, down, sizes)


def _check_ratio(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; it must be a number in (0, 1], such as {name}=0.001."
        )
    if not 0 < float(value) <= 1:  # nor is NaN
        raise ValueError(
            f"{name}={value!r} must be in (0, 1]: the fraction that is sent. Use {name}=0.001 to send one entry in a "
            "thousand, 1 to send all."
        )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be True or False.")


def _check_name(name: str, value: Any, known: dict[str, Any], otherwise: str = "") -> None:
    allowed = f"it must be one of {', '.join(map(repr, known))}{otherwise}."
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; {allowed}")
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; {allowed}")
