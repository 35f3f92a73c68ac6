"""``bench wire``: bits of positions and bytes of payloads, against the entropy of random positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.report import Result
from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.plan import Row
from lightning_topk.volume import volume

WORLDS = (2, 4, 8, 16, 32, 64)


def entropy(ratio: float) -> float:
    """Bits for each entry of a random set that holds a fraction ``ratio`` of all positions: H(ratio) / ratio."""
    return -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / ratio if ratio < 1 else 0.0


def run(numel: int = 25_000_000, ratios: Sequence[float] = (0.001, 0.01)) -> Result:
    """Counts bits and bytes."""
    result = Result(
        "wire",
        "positions cost their entropy",
        f"{numel:,} elements, sharded and bidirectional. Bound of bf16: 16 bits and a position's entropy per entry.",
    )
    curves = result.panel("bytes a rank sends over the bound", "workers", xlog=True)
    entries = result.tables["An entry, of 4 workers"] = []
    for ratio in ratios:
        config, bits = TopKConfig(ratio=ratio, wire="bf16"), entropy(ratio)
        rows = result.tables[f"Bytes at {ratio} (bf16; entropy {bits:.2f} bits an entry)"] = []
        for world in WORLDS:
            plan, sent = plan_bucket(config, [numel], world), volume(config, [numel], world)
            up = plan.codecs().uplink
            nbytes, k = sent.sent, up.k * plan.layout.shards
            index, bound = 8 * up.format().index_bytes / up.k, 2 * k * (world - 1) / world * (bits + 16) / 8
            row = {"workers": world, "index bits an entry": index, "of entropy": index / bits, "bytes sent": nbytes}
            rows.append(row | {"of the bound": nbytes / bound, "dense bytes": sent.dense})
            if world == 4:
                position = f"{index:.1f} ({index / bits:.2f}x its entropy)"
                words: Row = {"density": f"{ratio:g}", "bits a position": position}
                sizes = {name: Codec(wire, up.universe, up.k).nbytes / up.k for name, wire in WIRES.items()}
                entries.append(words | {f"bytes an entry, {name}": f"{size:.2f}" for name, size in sizes.items()})
        curves[str(ratio)] = (WORLDS, [row["of the bound"] for row in rows])
        for key, target in (("of entropy", 1.06), ("of the bound", 1.08)):
            seen = round(max(row[key] for row in rows), 2)  # rounded like the target
            result.check(f"{key}, at {ratio}, the worst", f"<= {target}", f"{seen:.2f}", seen <= target)
    return result
