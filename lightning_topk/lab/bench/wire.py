"""``bench wire``: bits and bytes against their entropy, and the speed of encoding, decoding and aggregation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from tqdm import tqdm

from lightning_topk.build import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.link import aggregate
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.lab.report import Panel, Result
from lightning_topk.lab.timing import best
from lightning_topk.volume import volume

WORLDS = (2, 4, 8, 16, 32, 64)


def entropy(ratio: float) -> float:
    """Bits for each entry of a random set that holds a fraction ``ratio`` of all positions: H(ratio) / ratio."""
    return -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / ratio if ratio < 1 else 0.0


def run(
    numel: int = 25_000_000, device: Literal["cpu", "cuda"] = "cpu", ratios: Sequence[float] = (0.001, 0.01)
) -> Result:
    """Counts bytes against their entropy, and times coding and aggregation.

    Args:
        numel: Elements of the gradient.
        device: Where the gradient lives.
        ratios: Kept fractions.
    """
    where = torch.device(device)
    result = Result(
        "wire",
        "positions cost their entropy, and coding costs little beside one pass over a shard",
        f"{numel:,} elements, sharded and bidirectional; times on {where}, least of 5 runs, W = 4.",
    )
    panel = Panel("bytes a rank sends over the bound", "workers", xlog=True)
    for ratio in tqdm(ratios, desc="wire", leave=False):
        config = TopKConfig(ratio=ratio, wire="bf16")
        bits = entropy(ratio)
        rows = []
        for world in WORLDS:
            plan = plan_bucket(config, [numel], world, in_pieces=False)
            layout, up = plan.shape.layout, plan.codecs().uplink
            sent = volume(config, [numel], world)
            nbytes = sent.uplink + sent.downlink
            k = up.kept * layout.shards
            bound = 2 * k * (world - 1) / world * (bits + 16) / 8
            rows.append(
                {
                    "workers": world,
                    "index bits an entry": 8 * up.index_bytes / up.kept,
                    "of entropy": 8 * up.index_bytes / up.kept / bits,
                    "bytes sent": nbytes,
                    "of the bound": nbytes / bound,
                    "dense bytes": sent.dense,
                }
            )
        result.tables[f"Bytes at {ratio} (bf16; entropy {bits:.2f} bits an entry)"] = rows
        panel.curves[str(ratio)] = (WORLDS, [row["of the bound"] for row in rows])
        for key, target in (("of entropy", 1.06), ("of the bound", 1.08)):
            seen = round(max(row[key] for row in rows), 2)  # as the target is written
            result.check(f"{key}, at {ratio}, the worst", f"<= {target}", f"{seen:.2f}", seen <= target)
        _speed(result, numel, ratio, where)
    result.panels.append(panel)
    return result


def _speed(result: Result, numel: int, ratio: float, where: torch.device) -> None:
    """Times of one shard of four."""
    world, rows = 4, []
    config = TopKConfig(ratio=ratio, wire="bf16")
    plan = plan_bucket(config, [numel], world, in_pieces=False)
    layout, up = plan.shape.layout, plan.codecs().uplink
    shard = torch.zeros(up.universe, device=where)
    other = torch.randn_like(shard)
    one_pass = best(lambda: torch.add(shard, other, out=other), where)
    shard.zero_()
    for name, wire in WIRES.items():
        codec = Codec(wire, up.universe, up.kept)
        index = torch.stack([torch.randperm(up.universe)[: up.kept].sort().values for _ in range(world)]).to(where)
        value = torch.randn(index.shape, device=where)
        payload, _ = codec.encode(index, value)
        read = best(payload.clone, where)
        encode = best(partial(codec.encode, index, value), where)
        decode = best(partial(codec.decode, payload, torch.float32), where)
        average = best(partial(aggregate, payload, codec, torch.float32, shard), where, shard.zero_)
        rows.append(
            {
                "wire": name,
                "bytes an entry": codec.nbytes / codec.kept,
                "encode ms": 1000 * encode,
                "decode ms": 1000 * decode,
                "decode + aggregate ms": 1000 * average,
                "of payload read + one pass over the shard": average / (read + one_pass),
            }
        )
        if name == "bf16":
            seen = average / (read + one_pass)
            statement = f"decode + aggregate at {ratio}, in payload reads + passes over the shard"
            result.check(statement, "<= 2", f"{seen:.2f}", seen <= 2)
    result.tables[f"Coding at {ratio}: {world} payloads of {layout.shard_size:,} elements"] = rows
