"""Steps of DDP with ours and with each peer, as processes on this host: nothing crosses a slow link."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_topk.lab.bench.hosts import check_peers, judge, steps
from lightning_topk.lab.bench.peers import ON_NODES, PEERS
from lightning_topk.lab.hosts import local
from lightning_topk.lab.report import Result


def run(
    workers: int = 2,
    numel: int = 25_000_000,
    ratio: float = 0.001,
    bucket_cap_mb: float = 128,
    seconds: float = 5,
    peers: Sequence[str] | None = None,
) -> Result:
    """Times them.

    Args:
        workers: Processes.
        numel: Parameters of the model.
        ratio: Kept fraction.
        bucket_cap_mb: DDP's. By default the model is one bucket: there is no backward to hide behind, so latency is paid once.
        seconds: Time for each peer, about.
        peers: Which of :data:`lightning_topk.lab.bench.peers.PEERS`. Default: all that make a difference.

    Raises:
        ValueError: A peer is unknown.
    """
    peers = peers or [peer for peer in PEERS if peer not in ON_NODES]
    check_peers(peers)
    result = Result(
        "step",
        "what compression costs where links cost nothing",
        f"{workers} processes on this machine, gloo by loopback, one thread each; a DDP model of {numel:,} float32 parameters "
        f"whose backward is as good as free; ratio {ratio}, buckets of {bucket_cap_mb} MiB that gradients are views of; least of several steps.",
    )
    judge(result, "loopback", steps(local(workers), numel, ratio, bucket_cap_mb, seconds, peers), published=False)
    return result
