"""The systems of the papers, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_topk.schedule import ExponentialWarmup

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
    },
    "trimmed": {"selector": "trimmed", "topology": "allgather", "bidirectional": False},
    "parameter_server": {"topology": "single_server", "bidirectional": True},
}
presets: Mapping[str, Mapping[str, Any]] = {
    name: {"ratio": 0.001, "wire": "bf16", "adapt_momentum": False, **system} for name, system in _SYSTEMS.items()
}
"""The systems of the papers, unchanged, as arguments of :class:`lightning_topk.TopKConfig` and of the strategies.

``dense``: Dense-SGD, through the exchange. ``topk``, ``gaussiank``, ``trimmed``: TopK-SGD of Shi et al. 2019, by
all-gather, with that selector. ``randk``: the same random positions on all ranks. ``dgc``: DGC-SGD of Lin et al. 2018,
complete; set the optimizer's momentum to 0. ``bidirectional_topk``: Zou 2022 with a server on every rank;
``parameter_server``: with one server.
"""
